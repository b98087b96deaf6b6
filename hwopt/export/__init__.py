"""Plans in the formats of other tools, and what their launchers say: Accelerate, DeepSpeed."""
