"""TOML files become a validated Profile and Job; every value keeps the file and line it came from."""
