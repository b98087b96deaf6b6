"""How gradients meet: engines for one rank and for several, and the out-of-memory back-off."""
