"""Plans in the formats of other tools: Accelerate, DeepSpeed, launcher environments."""
