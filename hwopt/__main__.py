"""`python -m hwopt`, and what `accelerate launch -m hwopt` starts on every rank."""

from hwopt.cli import main

main()
