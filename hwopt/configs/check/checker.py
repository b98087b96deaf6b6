"""Checks a file: reads it, finds the card, and applies the installed rules, which are entry points of the group `hwopt.rules`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from hwopt.config.card import Card
from hwopt.config.entry_points import origin, registered_twice
from hwopt.configs.check import NEEDS, Facts, Finding, Level, Rule
from hwopt.configs.recognise import hwopt_tool, profile_view, read_source, view_of
from hwopt.configs.source_file import SourceFile
from hwopt.configs.view import TOOL_NAMES, View
from hwopt.errors import InputError, PluginError
from hwopt.hardware.device import Hardware, described
from hwopt.planning.decisions import given_options
from hwopt.planning.inputs import Inputs
from hwopt.plugin.guard import plugin_guard
from hwopt.text import truncate

LEVELS: tuple[Level, ...] = ("error", "warning", "information")
RULE_GROUP = "hwopt.rules"


@dataclass(frozen=True)
class CheckReport:
    file: str
    format: str
    recognised_by: str
    card: str
    """The card and where it comes from."""
    findings: tuple[Finding, ...]
    unread: tuple[str, ...] = ()
    """Keys that no rule reads, or whose values only the program knows that reads the file."""
    rules: int = 0
    waiting: tuple[str, ...] = ()
    """Rules that were not applied, with what they need."""

    def count(self, level: Level) -> int:
        return sum(finding.level == level for finding in self.findings)

    def exit_code(self, strict: bool = False) -> int:
        """2 if there is an error, or with `strict` a warning; else 0."""
        return 2 if self.count("error") or (strict and self.count("warning")) else 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {f"{level}s" if level != "information" else level: self.count(level) for level in LEVELS}


def installed_rules(entry_points: Iterable[EntryPoint] | None = None) -> tuple[Rule, ...]:
    """Every rule, by name. An entry point is a Rule or an iterable of them.

    Raises PluginError if one cannot be imported, is not a Rule, or has the name of another one.
    """
    found: dict[str, tuple[Rule, str]] = {}
    for entry_point in metadata.entry_points(group=RULE_GROUP) if entry_points is None else entry_points:
        who = f"rules {entry_point.name!r} of {origin(entry_point)}"
        with plugin_guard(who, "fix or uninstall the package. Its import"):
            loaded = entry_point.load()
        for each in loaded if isinstance(loaded, list | tuple) else [loaded]:
            if not isinstance(each, Rule):
                raise PluginError(f"{who}: expected a hwopt.configs.check.Rule, or several, got {truncate(each)}")
            first = found.setdefault(each.name, (each, who))
            if first[0] is not each:
                raise registered_twice(f"rule {each.name!r}", first[1], who)
    return tuple(found[name][0] for name in sorted(found))


def check_file(path: Path, given: Given, inputs: Inputs | None = None) -> CheckReport:
    """The report on a configuration file. An invalid profile or job is a report with its problems as errors.

    Raises InputError if the file cannot be read or belongs to no known tool.
    """
    inputs = inputs or Inputs()
    source = read_source(path)
    card = None
    try:
        view = view_of(source, inputs)
        if view.tool == "hwopt-profile":
            profile = inputs.profile(source.name)
            given_options(profile, inputs.registry)
            card = profile.card
        if view.tool == "hwopt-job" and given.profile is not None:
            view = over_profile(view, path, given.profile, inputs)
    except InputError as error:
        if source.language != "TOML":
            raise
        findings = tuple(map(problem, str(error).splitlines()))
        return CheckReport(source.name, TOOL_NAMES[hwopt_tool(source)], "its tables", "", findings)
    facts, card_text = facts_of(view, given, inputs, card)
    return check(view, facts, installed_rules(), card_text)


def over_profile(view: View, path: Path, name: str, inputs: Inputs) -> View:
    """The view of a job with the profile's settings below its own. The size of the model is the job's, not the profile's.

    Raises InputError for plugin options of the job that are not valid.
    """
    profile = inputs.profile(name, (), inputs.job(path, ()))
    given_options(profile, inputs.registry)
    merged = profile_view(profile, SourceFile(name, "TOML", ())).settings
    merged.pop("parameters", None)
    own = {word: setting for word, setting in view.settings.items() if word not in merged or setting.key.startswith("training.")}
    return replace(view, settings={**merged, **own})


def problem(message: str) -> Finding:
    """A finding of a message about a profile or a job that is not valid; it begins with its place and its key."""
    parts = re.match(r"(?P<place>.+?:\d+): (?P<key>[\w.\[\]-]+): (?P<what>.+)", message, re.DOTALL)
    known = parts.groupdict() if parts else {"what": message}
    return Finding("", **known, why="`hwopt run` refuses the file.", level="error", rule="valid")


def check(view: View, facts: Facts, rules: Sequence[Rule], card: str = "") -> CheckReport:
    """Return what `rules` find in `view`, errors first. Raises PluginError if a rule raises."""
    found: list[Finding] = []
    waiting: dict[str, list[str]] = {}
    applied = 0
    for rule in (each for each in rules if each.concerns(view)):
        if lacking := [need for need in rule.needs if facts.lacks(need)]:
            waiting.setdefault(NEEDS[lacking[0]], []).append(rule.name)
            continue
        applied += 1
        with plugin_guard(f"rule {rule.name!r}", "the rule"):
            found += [reported(rule, finding, view) for finding in rule.function(view, facts)]
    found.sort(key=lambda each: (LEVELS.index(each.level or "error"), len(each.place), each.place))
    unread = tuple(each.key for each in view.unread if each.kind in ("unknown", "interpolation") and each.key not in view.asked)
    needs = tuple(f"{', '.join(names)}: needs {need}" for need, names in waiting.items())
    return CheckReport(view.source.name, TOOL_NAMES[view.tool], view.recognised_by, card, tuple(found), unread, applied, needs)


def reported(rule: Rule, finding: Finding, view: View) -> Finding:
    setting = view.found(finding.word)
    place, key = (setting.place, setting.key) if setting else (view.source.name, "")
    return replace(
        finding, rule=rule.name, level=finding.level or rule.level, place=finding.place or place, key=finding.key or key
    )


@dataclass(frozen=True)
class Given(Facts):
    """What the command line says, before the card is looked up."""

    card: str | None = None
    profile: str | None = None


def facts_of(view: View, given: Given, inputs: Inputs, own: Card | None = None) -> tuple[Facts, str]:
    """(facts, the card and where it comes from as text).

    The card is that of --card, of --profile, of the profile that is checked (`own`), or of this machine, in this order.
    """
    hardware, source = card_hardware(given, inputs, own)
    facts = replace(
        given,
        hardware=None if hardware.device_type == "cpu" else hardware,
        cores=given.cores or (hardware.cpu_cores if hardware.source == "detected" else None),
        parameters=given.parameters or view.number("parameters"),
        max_length=given.max_length or int(view.number("max_length") or 0) or None,
    )
    return facts, source


def card_hardware(given: Given, inputs: Inputs, own: Card | None) -> tuple[Hardware, str]:
    if given.card is not None:
        profile = inputs.profile_of_card(given.card)
        return of_card(profile.card, given.card), f"{given.card}, by --card ({profile.name})"
    if given.profile is not None:
        profile = inputs.profile(given.profile)
        return (hardware := of_card(profile.card, profile.name)), f"{hardware.name}, by --profile {profile.name}"
    if own is not None and own.capability is not None and own.memory_gib is not None:
        return (hardware := of_card(own, "card")), f"{hardware.name}, by the file"
    from hwopt.hardware.detect import detect  # imports torch, which takes seconds
    from hwopt.system.ranks import local_rank

    machine = detect(local_rank(os.environ))
    return machine, f"{machine.name}, of this machine" if machine.device_type == "cuda" else "none"


def of_card(card: Card, name: str) -> Hardware:
    if card.capability is None or card.memory_gib is None:
        raise InputError(f"--profile: {name} has no card; give one with --card NAME")
    name = card.match[0] if card.match else name
    return described(name, card.capability, card.memory_gib, multiprocessors=card.multiprocessors)
