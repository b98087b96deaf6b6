"""A model before training: its config, its facts for plugins, its weights on disk, and the trust in its code."""
