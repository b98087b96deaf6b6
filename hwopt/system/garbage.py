"""How often Python collects garbage while a command starts.

It imports a million objects, none of them garbage: usual collections take a fifth of the start-up time. While a model trains or
predicts, the usual thresholds hold: garbage may keep device memory allocated.
"""

from __future__ import annotations

import gc

USUAL = gc.get_threshold()
STARTING = (50_000, 20, 50)


def collect_seldom() -> None:
    """Collect garbage rarely, until `collect_as_usual`."""
    if gc.get_threshold() == USUAL:
        gc.set_threshold(*STARTING)


def collect_as_usual() -> None:
    """Undo `collect_seldom`. Thresholds that others set stay."""
    if gc.get_threshold() == STARTING:
        gc.set_threshold(*USUAL)
