"""The memory planner: predicts whether a plan fits its device, and suggests changes if it does not."""
