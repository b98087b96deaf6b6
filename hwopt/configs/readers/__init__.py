"""Readers of training configurations: one per tool, each from the entries of a file to a View."""
