"""A run in its folder: execute, resume, launch on several ranks, journal, status."""
