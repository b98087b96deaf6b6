"""The rules of plugin tables in profiles, as the installed plugins declare them: renamed options, values kept together."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from hwopt.config.renames import TableRules, job_key, replaced
from hwopt.config.toml import Key
from hwopt.errors import HwoptError
from hwopt.plugin.guard import plugin_guard
from hwopt.plugin.registry import Registry


def rules_of(registry: Registry) -> TableRules:
    """The rules that the plugins of `registry` declare.

    A plugin that is unknown or cannot be imported has none; `given_options` reports it with the place that names it.
    """

    def rename(key: Key) -> Key:
        if len(key) < 2 or key[0] != "plugins":
            return job_key(key)
        if len(key) == 2:
            return ("plugins", registry.present_name(key[1]))
        with suppress(HwoptError):
            return (*key[:2], registry.plugin(key[1]).renamed_options.get(key[2], key[2]))
        return key

    def merge(name: str, below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
        try:
            plugin = registry.plugin(name)
        except HwoptError:
            return replaced(name, below, above)
        with plugin_guard(f"plugin {name!r} of {registry.distribution(name)}", "Options.merged()"):
            return dict(plugin.Options.merged(below, above))

    return TableRules(rename, merge)
