"""What the plugins of a plan could do otherwise: the scales that they offer, and a choice as changes of their tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hwopt.planning.plan import Plan
from hwopt.plugin import Choice, PluginOptions, Scale
from hwopt.plugin.guard import plugin_guard
from hwopt.plugin.registry import Registry


def current_options(name: str, plan: Plan) -> PluginOptions | None:
    """The options of an applied plugin; None if it is not applied."""
    return next((entry.options for entry in plan.applied() if entry.name == name), None)


def scales_of(name: str, plan: Plan, registry: Registry) -> Sequence[Scale]:
    """The scales that the plugin offers for `plan`. Raises PluginError if its hook raises."""
    with plugin_guard(f"plugin {name!r} of {registry.distribution(name)}", "alternatives()"):
        return list(registry.plugin(name).alternatives(current_options(name, plan), plan.context))


def changes_of(name: str, choice: Choice, plan: Plan) -> dict[str, Any]:
    """The changes of `choice`, which also turn on a plugin that is not applied."""
    return {**({} if current_options(name, plan) else {"enabled": True}), **choice.changes}
