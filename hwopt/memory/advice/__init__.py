"""What to change in a plan: to save memory, or to use what is left of it."""
