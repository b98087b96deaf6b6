"""What evidence may read: a run without its plan, and a plugin without its options."""

from __future__ import annotations

from copy import copy
from typing import Any

from hwopt.plugin import Evidence, Plugin

NOT_OBSERVED = ("plan", "recipe", "training", "batch", "loss")
"""Attributes of a run that say what was asked for, not what runs. `loss` is the recipe's."""


class ObservedRun:
    """A run whose attributes are read through this object; those of NOT_OBSERVED raise AssertionError."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def __getattr__(self, name: str) -> Any:
        assert name not in NOT_OBSERVED, f"evidence() reads run.{name}, which is what was asked for. Read the running objects"
        return getattr(self._run, name)


class NoOptions:
    """The options of a plugin while its evidence is collected: reading one raises AssertionError."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"evidence() reads options.{name}. Return what is found, and compare it in expects()")


def observed_evidence(plugin: Plugin, run: Any) -> Evidence:
    """The evidence of `plugin` without access to options, plan and recipe, compared with what its options ask for.

    Raises AssertionError if evidence() reads one of them.
    """
    blind = copy(plugin)
    blind.options = NoOptions()
    return blind.evidence(ObservedRun(run)).compared(plugin.expects())
