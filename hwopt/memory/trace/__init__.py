"""A training step under fake tensors: which tensors live when."""
