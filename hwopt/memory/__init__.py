"""The memory planner: whether a plan fits its device, and what to change where it does not."""
