"""Save, verify and load checkpoints, the best weights and `final/`."""
