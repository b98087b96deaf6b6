"""Profiles: one TOML a card, found through the entry-point group `hwopt.profiles`."""
