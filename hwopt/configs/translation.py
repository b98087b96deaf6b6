"""A view as tables of a profile and a job. Every setting is taken over, left out with a reason, or listed without equivalent.

Options of plugins come from the plugins (`Plugin.aliases`); keys of jobs from `job_words`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hwopt.config.aliases import INSTEAD, plugin_aliases
from hwopt.config.job import Job, TaskOptions
from hwopt.config.task_kinds import kinds_that_read
from hwopt.config.toml import Document
from hwopt.config.validation import validate
from hwopt.configs.job_words import add_defaults, job_setting
from hwopt.configs.view import ConfigSetting, Omitted, View, ignored, without
from hwopt.configs.words import SCHEDULE_OPTIONS
from hwopt.errors import HwoptError, InputError
from hwopt.plugin.imports import options_from
from hwopt.plugin.registry import Registry
from hwopt.text import first_line, listing, truncate


@dataclass(frozen=True)
class Taken:
    setting: ConfigSetting
    key: tuple[str, ...]
    """("plugins", NAME, OPTION) of the profile, or (TABLE, KEY) of the job."""
    value: Any
    note: str = ""


@dataclass
class Translation:
    view: View
    taken: list[Taken] = field(default_factory=list)
    left: list[ConfigSetting] = field(default_factory=list)
    """What is in neither new file."""

    def tables(self, kind: Literal["profile", "job"]) -> dict[tuple[str, ...], Taken]:
        """What the profile, or the job, holds: key -> the setting behind it."""
        return {each.key: each for each in self.taken if (each.key[0] == "plugins") == (kind == "profile")}

    def lists(self) -> Iterator[tuple[str, list[ConfigSetting]]]:
        """The titles and the settings of both lists of what was left out."""
        yield "Without an equivalent in hwopt:", [each for each in self.left if not each.on_purpose]
        yield "Left out on purpose:", [each for each in self.left if each.on_purpose]


NOTES = {
    ("fp16_opt_level", "O2"): "transformers ignored it with native AMP and trained as O1. In hwopt O2 means half-precision "
    "weights with fp32 masters; O1 is what the file did",
    ("packing", True): "hwopt counts samples instead of packed rows: effective_tokens keeps the tokens of a step",
    ("auto_find_batch_size", True): "transformers halves the batch and with it the rows of a step; hwopt keeps them",
}
"""(word, value) -> what changes although the value is taken over."""
NEEDED = {"model": {"name": "m"}, "data": {"train": "t"}}
"""Table of a job -> the keys that it needs besides the one to check."""
PAIRS = {"prompt": {"completion": "c"}, "completion": {"prompt": "p"}}
"""Key of a job -> the key that comes with it."""


def translate(view: View, registry: Registry, kind: str | None = None) -> Translation:
    """Return the settings of `view` in hwopt's words, for the task `kind` instead of that of the file."""
    found = Translation(view)
    add_defaults(view)
    found.left += count_in_tokens(view) + without_adapter(view)
    options = Options(registry, found)
    kind = kind or view.value("task", TaskOptions().kind)
    schedule = {word: view.value(word) for word in ("lr_scheduler_type", SCHEDULE_OPTIONS) if word in view}
    # the type of the loaded weights gives way to that of the products
    for setting in sorted(view.settings.values(), key=lambda each: each.word == "torch_dtype"):
        if setting.reason:  # a guess, listed with what could not be read
            continue
        try:
            result = job_setting(view, setting.word, setting.value)
            if result is None and setting.word in plugin_aliases():
                result = options.ask(setting)
            elif result is None:
                result = without(INSTEAD.get(setting.word, "hwopt has no such setting"))
            elif not isinstance(result, Omitted):
                (table, name), value = result
                owners = kinds_that_read(f"{table}.{name}")
                needed = NEEDED.get(table, {}) | PAIRS.get(name, {}) | (schedule if name in schedule else {})
                if why := problem(Job.model_fields[table].annotation, (table,), {**needed, name: value}):
                    result = without(why)
                elif owners and kind not in owners:
                    result = without(f"belongs to task.kind = {listing(owners)}")
        except (HwoptError, TypeError, ValueError) as error:  # such as a list where a text belongs
            result = without(first_line(error))
        if isinstance(result, Omitted):
            found.left.append(setting.left(*result))
        elif result is not None:
            found.taken.append(Taken(setting, *result))
    pair = [each for each in found.taken if each.key[-1] in PAIRS]
    if len(pair) == 1:
        found.taken.remove(pair[0])
        found.left.append(pair[0].setting.left("data.prompt and data.completion go together"))
    options.settle()
    order = list(options.accepted)  # a plan sorts the plugins itself
    found.taken.sort(key=lambda each: order.index(each.key[1]) if each.key[0] == "plugins" else len(order))
    found.left += view.unread
    return found


def count_in_tokens(view: View) -> list[ConfigSetting]:
    """Give the step of a `view` with packing in tokens, and return the settings that count its packed rows."""
    rows, length = view.effective_rows, view.number("max_length")
    if rows is None or length is None or not view.is_on("packing"):
        return []
    tokens = rows * int(length)
    view.imply("effective_tokens", tokens, view.settings["packing"])
    reason = f"counts packed rows: effective_tokens = {tokens} has the tokens of a step"
    words = ("gradient_accumulation_steps", "effective_batch_size")
    return [view.settings.pop(word).left(reason, "other") for word in words if word in view]


def without_adapter(view: View) -> list[ConfigSetting]:
    """The settings of an adapter in a `view` that asks for none: the tool does not read them. They are taken out."""
    if view.adapter or not view.lacks("use_peft"):
        return []
    plugin = plugin_aliases()["use_peft"].split(".")[1]
    words = [word for word in view.settings if plugin_aliases().get(word, "").split(".")[1:2] == [plugin]]
    left = ignored("no adapter is asked for, so it has no effect")
    if view.adapter is None:
        left = without(f"the file does not say that the program trains an adapter; [plugins.{plugin}] switches one on")
    return [view.settings.pop(word).left(*left) for word in words]


def problem(model: Any, at: tuple[str, ...], table: Mapping[str, Any]) -> str:
    """Why `model` refuses the `table` at a key; "" if it accepts it."""
    data: dict[str, Any] = dict(table)
    for part in reversed(at):
        data = {part: data}
    try:
        validate(model, Document("new", data), at)
    except InputError as error:
        return first_line(error).removeprefix("new: ")
    return ""


class Options:
    """Collects the options of plugins; each is kept if the plugin accepts it together with the others."""

    def __init__(self, registry: Registry, found: Translation) -> None:
        self.registry, self.found = registry, found
        self.asked: list[tuple[ConfigSetting, str, dict[str, Any]]] = []
        self.accepted: dict[str, dict[str, Any]] = {}
        self.sources: dict[tuple[str, str], ConfigSetting] = {}

    def ask(self, setting: ConfigSetting) -> Omitted | None:
        """Ask the plugin that declares the word for its options; the result says why there are none."""
        alias = plugin_aliases()[setting.word]
        plugin = alias.split(".")[1]
        options = options_from(self.registry.plugin(plugin).aliases[setting.word], setting.value)
        if options is None:
            return without(f"{alias.split(' ')[0]} has no such value")
        if not options:
            return ignored("what hwopt does without the setting")
        self.asked.append((setting, plugin, dict(options)))
        return None

    def settle(self) -> None:
        """Take every option that its plugin accepts. An option may need one that the file gives later."""
        rest = self.asked
        for _ in self.asked:
            rest = [each for each in rest if not self.take(*each)]
        self.found.left += [setting.left(self.problem(plugin, options)) for setting, plugin, options in rest]

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
        return problem(self.registry.plugin(plugin).Options, ("plugins", plugin), both)
