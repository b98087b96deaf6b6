"""A view as tables of a profile and a job. Every setting is taken over, left out with a reason, or listed without equivalent.

Options of plugins come from the plugins (`Plugin.aliases`); keys of jobs from `job_words`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from hwopt.config.aliases import INSTEAD, plugin_aliases
from hwopt.config.job import Data, TaskOptions
from hwopt.config.job_model import Model
from hwopt.config.job_training import Training
from hwopt.config.job_values import Table
from hwopt.configs.job_words import Omitted, job_setting
from hwopt.configs.view import ConfigSetting, Unread, View
from hwopt.errors import HwoptError
from hwopt.plugin.imports import options_from
from hwopt.plugin.registry import Registry
from hwopt.text import first_line, truncate


@dataclass(frozen=True)
class Taken:
    """A setting in its new place."""

    setting: ConfigSetting
    key: tuple[str, ...]
    """("plugins", NAME, OPTION) of the profile, or (TABLE, KEY) of the job."""
    value: Any
    note: str = ""


@dataclass(frozen=True)
class Left:
    """A key of the file that is in neither new file."""

    kind: Literal["ignored", "no equivalent"]
    key: str
    value: Any
    place: str
    reason: str
    comments: tuple[str, ...] = ()


@dataclass
class Translation:
    view: View
    taken: list[Taken] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)

    def leave(self, setting: ConfigSetting, kind: Literal["ignored", "no equivalent"], reason: str) -> None:
        self.left.append(Left(kind, setting.key, setting.value, setting.place, reason, setting.comments))

    def tables(self, kind: Literal["profile", "job"]) -> dict[tuple[str, ...], Taken]:
        """What the profile, or the job, holds: key -> the setting behind it."""
        return {each.key: each for each in self.taken if (each.key[0] == "plugins") == (kind == "profile")}


NOTES = {
    (
        "fp16_opt_level",
        "O2",
    ): "transformers ignored it with native AMP and trained as O1. In hwopt O2 means half-precision weights "
    "with fp32 masters; O1 is what the file did",
    ("auto_find_batch_size", True): "transformers halves the batch and with it the rows of a step; hwopt keeps them",
}
"""(word, value) -> what changes although the value is taken over."""


def translate(view: View, registry: Registry) -> Translation:
    """Return the settings of `view` in hwopt's words."""
    found = Translation(view)
    options = Options(found, registry)
    for word, setting in view.settings.items():
        if setting.doubt:  # listed with what could not be read
            continue
        if to_job(found, setting):
            continue
        if word in plugin_aliases():
            options.ask(setting)
        else:
            found.leave(setting, "no equivalent", INSTEAD.get(word, "hwopt has no such setting"))
    options.settle()
    order = in_order(options.accepted, registry)
    found.taken.sort(key=lambda each: order.index(each.key[1]) if each.key[0] == "plugins" else len(order))
    found.left += [left_of(unread) for unread in view.unread]
    return found


def in_order(names: Iterable[str], registry: Registry) -> list[str]:
    """The plugins `names`, each behind those that its class names in `after`."""
    given = list(names)
    before = {name: [other for other in registry.plugin(name).relations.after if other in given] for name in given}
    return list(TopologicalSorter(before).static_order())


def left_of(unread: Unread) -> Left:
    kind: Literal["ignored", "no equivalent"] = "ignored" if unread.kind in ("other", "replaced") else "no equivalent"
    return Left(kind, unread.key, unread.value, unread.place, unread.reason, unread.comments)


TABLES: Mapping[str, tuple[type[Table], dict[str, Any]]] = {
    "model": (Model, {"name": "m"}),
    "data": (Data, {"train": "t"}),
    "task": (TaskOptions, {}),
    "training": (Training, {}),
}
"""Table of a job -> its class, and the keys that it needs besides the one to check."""


def to_job(found: Translation, setting: ConfigSetting) -> bool:
    """Take a setting into the job, or list why not. Returns False for an option of a plugin, and for an unknown word."""
    try:
        result = job_setting(found.view, setting.word, setting.value)
        if result is None:
            return False
        if isinstance(result, Omitted):
            found.leave(setting, *result)
            return True
        key, value = result
        model, others = TABLES[key[0]]
        model.model_validate({**others, key[1]: value})
    except TypeError as reason:
        found.leave(setting, "no equivalent", str(reason))
    except ValidationError as error:
        found.leave(setting, "no equivalent", f"{'.'.join(key)}: {error.errors()[0]['msg'].lower()}")
    else:
        found.taken.append(Taken(setting, key, value))
    return True


class Options:
    """Collects the options of plugins; each is kept if the plugin accepts it together with the others."""

    def __init__(self, found: Translation, registry: Registry) -> None:
        self.found, self.registry = found, registry
        self.asked: list[tuple[ConfigSetting, str, dict[str, Any]]] = []
        self.accepted: dict[str, dict[str, Any]] = {}
        self.sources: dict[tuple[str, str], ConfigSetting] = {}

    def ask(self, setting: ConfigSetting) -> None:
        """Ask the plugin that declares the word for its options."""
        alias = plugin_aliases()[setting.word]
        plugin = alias.split(".")[1]
        try:
            options = options_from(self.registry.plugin(plugin).aliases[setting.word], setting.value)
        except (HwoptError, TypeError, ValueError) as error:
            self.found.leave(setting, "no equivalent", first_line(error))
            return
        if options is None:
            self.found.leave(setting, "no equivalent", f"{alias.split(' ')[0]} has no such value")
        elif not options:
            self.found.leave(setting, "ignored", "what hwopt does without the setting")
        else:
            self.asked.append((setting, plugin, dict(options)))

    def settle(self) -> None:
        """Take every option that its plugin accepts. An option may need one that the file gives later."""
        while rest := [each for each in self.asked if not self.take(*each)]:
            if len(rest) == len(self.asked):
                break
            self.asked = rest
        else:
            return
        for setting, plugin, options in rest:
            self.found.leave(setting, "no equivalent", self.problem(plugin, options))

    def take(self, setting: ConfigSetting, plugin: str, options: dict[str, Any]) -> bool:
        if self.problem(plugin, options):
            return False
        self.accepted[plugin] = {**self.accepted.get(plugin, {}), **options}
        note = NOTES.get((setting.word, setting.value), "") if isinstance(setting.value, str | bool) else ""
        for option, value in options.items():
            self.sources[plugin, option] = setting
            self.found.taken.append(Taken(setting, ("plugins", plugin, option), value, note))
        return True

    def problem(self, plugin: str, options: dict[str, Any]) -> str:
        """Why the options cannot be added to those that are accepted; "" if they can."""
        before = self.accepted.get(plugin, {})
        for option, value in options.items():
            if option in before and before[option] != value:
                first = self.sources[plugin, option]
                return f"plugins.{plugin}.{option} is {truncate(before[option])} already, by {first.key} ({first.place})"
        both = {key: value for key, value in {**before, **options}.items() if key != "enabled"}
        try:
            self.registry.plugin(plugin).Options.model_validate_json(TypeAdapter(dict[str, Any]).dump_json(both), strict=True)
        except ValidationError as error:
            return option_problem(plugin, error)
        except HwoptError as error:
            return first_line(error)
        return ""


def option_problem(plugin: str, error: ValidationError) -> str:
    """The first problem of a plugin's options, with what is accepted; pydantic reports one for each member of a union."""
    found = error.errors()
    option, given = found[0]["loc"][:1], found[0].get("input")
    messages = [each["msg"] for each in found if each["loc"][:1] == option]
    accepted = ", or ".join(dict.fromkeys(message.removeprefix("Input should be ") for message in messages))
    where = ".".join(["plugins", plugin, *map(str, option)])
    if not option:
        return f"{where}: {messages[0].removeprefix('Value error, ')}"
    return f"{where}: expected {accepted}, got {truncate(given)}"
