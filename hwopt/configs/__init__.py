"""Configurations that others wrote: recognised, read, translated into hwopt's files, and checked."""
