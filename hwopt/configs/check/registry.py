"""The installed rules, found through entry points. Built-in rules are registered in the same way."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import metadata
from importlib.metadata import EntryPoint

from hwopt.configs.check.contract import Rule
from hwopt.errors import PluginError
from hwopt.plugin.guard import plugin_guard
from hwopt.plugin.registry import distribution_of
from hwopt.text import truncate

RULE_GROUP = "hwopt.rules"


def installed_rules(entry_points: Iterable[EntryPoint] | None = None) -> tuple[Rule, ...]:
    """Every rule, by name. An entry point is a Rule or an iterable of them.

    Raises PluginError if one cannot be imported, is not a Rule, or has the name of another one.
    """
    found: dict[str, tuple[Rule, str]] = {}
    for entry_point in metadata.entry_points(group=RULE_GROUP) if entry_points is None else entry_points:
        who = f"rules {entry_point.name!r} of {distribution_of(entry_point)} ({entry_point.value})"
        with plugin_guard(who, "fix or uninstall the package. Its import"):
            loaded = entry_point.load()
        for each in (loaded,) if isinstance(loaded, Rule) or not isinstance(loaded, Iterable) else tuple(loaded):
            check_rule(each, who)
            first = found.setdefault(each.name, (each, who))
            if first[0] is not each:
                raise PluginError(f"rule {each.name!r} is registered by {first[1]} and again by {who}; uninstall one of them")
    if not found:
        raise PluginError(f"no rules are installed in the group {RULE_GROUP!r}; install hwopt again, as by pip install -e .")
    return tuple(found[name][0] for name in sorted(found))


def check_rule(found: object, who: str) -> None:
    """Raise PluginError if `found` is not a rule."""
    if not isinstance(found, Rule):
        raise PluginError(f"{who}: expected a hwopt.configs.check.Rule, or several, got {truncate(found)}")
