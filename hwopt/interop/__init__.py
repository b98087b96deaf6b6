"""Plans in the words of other tools, one format a module: pure functions from a plan to what the file holds."""
