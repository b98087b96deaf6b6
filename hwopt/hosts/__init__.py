"""Plans in other people's training loops. A host gives a plan what its script says, and applies what it can take of the recipe."""
