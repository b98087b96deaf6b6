"""Plans in other people's training loops: a host says what its script trains, and takes what it can of the recipe."""
