"""A model before it trains: its config, the facts that plugins ask for, its weights on disk."""
