"""How much memory a plan takes, and which sizes fit."""
