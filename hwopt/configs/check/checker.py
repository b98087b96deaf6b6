"""Applies the rules to a view, and collects what they find."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hwopt.configs.check.contract import NEEDS, Facts, Finding, Level, Rule
from hwopt.configs.view import TOOL_NAMES, View
from hwopt.errors import InputError
from hwopt.plugin.guard import plugin_guard

LEVELS: tuple[Level, ...] = ("error", "warning", "information")


@dataclass(frozen=True)
class Reported:
    """A finding with its rule, level and place."""

    rule: str
    level: Level
    place: str
    key: str
    what: str
    why: str
    fix: str


@dataclass(frozen=True)
class CheckReport:
    file: str
    format: str
    """The tool that the file belongs to."""
    recognised_by: str
    card: str
    """The card and where it comes from."""
    findings: tuple[Reported, ...]
    unread: tuple[str, ...] = ()
    """Keys that no rule can read."""
    rules: int = 0
    """How many rules were applied."""
    waiting: tuple[str, ...] = ()
    """Rules that were not applied, with what they need."""

    def count(self, level: Level) -> int:
        return sum(finding.level == level for finding in self.findings)

    def exit_code(self, strict: bool = False) -> int:
        """2 if there is an error, or with `strict` a warning; else 0."""
        return 2 if self.count("error") or (strict and self.count("warning")) else 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {f"{level}s" if level != "information" else level: self.count(level) for level in LEVELS}


def check(view: View, facts: Facts, rules: Sequence[Rule], card: str = "") -> CheckReport:
    """Return what `rules` find in `view`, errors first. Raises PluginError if a rule raises."""
    found: list[Reported] = []
    waiting: dict[str, list[str]] = {}
    applied = 0
    for rule in rules:
        if not rule.concerns(view):
            continue
        if lacking := [need for need in rule.needs if facts.lacks(need)]:
            waiting.setdefault(NEEDS[lacking[0]], []).append(rule.name)
            continue
        applied += 1
        with plugin_guard(f"rule {rule.name!r}", "the rule"):
            found += [reported(rule, finding, view) for finding in rule.function(view, facts)]
    found.sort(key=lambda each: (LEVELS.index(each.level), line_number(each.place)))
    unread = tuple(each.key for each in view.unread if each.kind == "unknown")
    needs = tuple(f"{', '.join(names)}: needs {need}" for need, names in waiting.items())
    return CheckReport(view.name, TOOL_NAMES[view.tool], view.recognised_by, card, tuple(found), unread, applied, needs)


def reported(rule: Rule, finding: Finding, view: View) -> Reported:
    setting = view.settings.get(finding.word)
    place = finding.place or (setting.place if setting else view.name)
    key = finding.key or (setting.key if setting else "")
    return Reported(rule.name, finding.level or rule.level, place, key, finding.what, finding.why, finding.fix)


def invalid(file: str, format_: str, error: InputError) -> CheckReport:
    """The report of a profile or job that is not valid: each problem is an error."""
    findings = [problem(line) for line in str(error).splitlines()]
    return CheckReport(file, format_, "its tables", "", tuple(findings))


def problem(message: str) -> Reported:
    """A finding of a message that begins with its place and its key."""
    parts = re.match(r"(?P<place>.+?:\d+): (?P<key>[\w.\[\]-]+): (?P<what>.+)", message, re.DOTALL)
    if parts is None:
        return Reported("valid", "error", "", "", message, "`hwopt run` refuses the file.", "")
    return Reported("valid", "error", parts["place"], parts["key"], parts["what"], "`hwopt run` refuses the file.", "")


def line_number(place: str) -> int:
    found = re.search(r":(\d+)$", place)
    return int(found[1]) if found else 0


def worst(reports: Iterable[CheckReport], strict: bool) -> int:
    """The exit code of a command that checked several files."""
    return max((report.exit_code(strict) for report in reports), default=0)
