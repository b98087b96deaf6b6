"""Registry: the installed plugins, found through entry points. Built-in plugins are registered in the same way.

Group `hwopt.plugins`: name -> plugin class. Group `hwopt.profiles`: any name -> a package that contains TOML files.
A plugin that cannot be loaded is an error that names the plugin and its distribution, never a silent skip.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib import metadata
from importlib.metadata import EntryPoint
from types import FunctionType
from typing import TYPE_CHECKING, get_args

from hwopt.config.entry_points import by_name, distribution_of, install_command
from hwopt.errors import InputError, PluginError
from hwopt.plugin.guard import plugin_guard
from hwopt.text import listing, nearest, truncate

if TYPE_CHECKING:  # importing pydantic would slow down `hwopt profiles`
    from hwopt.plugin.contract import Plugin


PLUGIN_GROUP = "hwopt.plugins"


class Registry:
    """The installed plugin classes by name, imported on first use."""

    def __init__(self, entry_points: Iterable[EntryPoint] | None = None) -> None:
        found = metadata.entry_points(group=PLUGIN_GROUP) if entry_points is None else entry_points
        self._entry_points = by_name(found, "plugin")
        self._classes: dict[str, type[Plugin]] = {}

    @property
    def names(self) -> list[str]:
        return sorted(self._entry_points)

    def distribution(self, name: str) -> str:
        """Name and version of the distribution that installed the plugin `name`."""
        return distribution_of(self._entry_points[name])

    def plugin(self, name: str, where: str = "") -> type[Plugin]:
        """The class of the plugin `name`. `where`: the file and line that name it, for the error message.

        Raises InputError for an unknown name, PluginError for a class that breaks the contract.
        """
        if name not in self._entry_points:
            raise InputError(
                f"{where + ': ' if where else ''}no plugin {name!r} is installed.{nearest(name, self.names)} "
                f"`hwopt plugins` lists all: {listing(self.names, 30)}"
            )
        if name not in self._classes:
            self._classes[name] = self._load(self._entry_points[name])
        return self._classes[name]

    def add(self, plugin: type[Plugin]) -> None:
        """Register a class for this process only, for example in a notebook or a test."""
        entry_point = EntryPoint(plugin.name, f"{plugin.__module__}:{plugin.__qualname__}", PLUGIN_GROUP)
        if plugin.name in self._entry_points:
            raise PluginError(f"plugin {plugin.name!r} is registered already, by {self.distribution(plugin.name)}")
        check_contract(plugin, plugin.name, "this process")
        self._entry_points[plugin.name] = entry_point
        self._classes[plugin.name] = plugin

    def _load(self, entry_point: EntryPoint) -> type[Plugin]:
        distribution = distribution_of(entry_point)
        who = f"plugin {entry_point.name!r} of {distribution} cannot be imported ({entry_point.value})"
        own = distribution.split()[0] == "hwopt"  # its module may have moved since hwopt was installed
        with plugin_guard(who, f"{f'run {install_command()}' if own else 'fix or uninstall the plugin'}. Its import"):
            loaded = entry_point.load()
        check_contract(loaded, entry_point.name, distribution)
        plugin: type[Plugin] = loaded
        return plugin


def check_contract(plugin: object, name: str, distribution: str) -> None:
    """Raise PluginError if `plugin` breaks the contract; the message has the first broken rule."""
    if rule := next(broken_rules(plugin, name), None):
        raise PluginError(f"plugin {name!r} of {distribution}: {rule}")


def broken_rules(plugin: object, name: str) -> Iterator[str]:
    """What breaks the contract in `plugin`. The class is checked first: the later rules need it."""
    from hwopt.plugin.contract import API_VERSION, Effect, Plugin, PluginOptions, Relations, Stage, Traits
    from hwopt.plugin.recipe import can_be_replaced

    if not (isinstance(plugin, type) and issubclass(plugin, Plugin)):
        yield f"expected a subclass of hwopt.plugin.Plugin, got {truncate(plugin)}"
        return
    if plugin.api_version != API_VERSION:
        yield f"uses plugin API {plugin.api_version}, this hwopt has {API_VERSION}; update one of them"
    if (own := getattr(plugin, "name", None)) != name:
        yield f"the `name` of its class is {own!r}; it must be the entry point's name"
    if not isinstance(getattr(plugin, "stage", None), Stage):
        yield f"`stage` must be one of {', '.join(stage.name for stage in Stage)}"
    if not (isinstance(plugin.Options, type) and issubclass(plugin.Options, PluginOptions)):
        yield "`Options` must be a subclass of hwopt.plugin.PluginOptions"
    if plugin.probe is Plugin.probe:
        yield "does not define probe()"
    if not (isinstance(plugin.effect, property) or plugin.effect in get_args(Effect)):
        yield f"`effect` must be bits, rounding or method, not {truncate(plugin.effect)}"
    for attribute, kind in (("traits", property | Traits), ("relations", Relations)):
        if not isinstance(found := getattr(plugin, attribute), kind):
            yield f"`{attribute}` must be a {attribute.capitalize()}(…), got {truncate(found)}"
    if wrong := [field for field in plugin.relations.replaces if not can_be_replaced(field)]:
        yield f"`replaces` names {truncate(wrong[0])}; expected a slot or a key, such as 'optimizer'"
    members = contract_members()
    for unknown in (member for member in declared_by(plugin) if member not in members):
        yield (
            f"a plugin has no attribute `{unknown}`.{nearest(unknown, members)} The members of the contract are "
            f"{listing(members, 30)}. Start the name of an attribute of your own with an underscore"
        )


def contract_members() -> list[str]:
    """The names that a plugin can define: the public members of `Plugin`."""
    from hwopt.plugin.contract import Plugin

    names = {**Plugin.__annotations__, **vars(Plugin)}
    return sorted(name for name in names if not name.startswith("_"))


def declared_by(plugin: type[Plugin]) -> Iterator[str]:
    """The public attributes of `plugin` that are neither functions nor constants in upper case."""
    for cls in plugin.__mro__:
        for name, value in {**vars(cls).get("__annotations__", {}), **vars(cls)}.items():
            function = isinstance(value, FunctionType | classmethod | staticmethod | type)
            if name.islower() and not name.startswith("_") and not function:
                yield name
