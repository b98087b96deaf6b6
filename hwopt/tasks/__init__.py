"""Tasks: what a sample, a loss and a metric are."""
