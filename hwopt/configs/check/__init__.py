"""Mistakes in training configurations. Rules are small functions, found through the entry-point group `hwopt.rules`.

A third-party rule imports from here only: `from hwopt.configs.check import Facts, Finding, View, rule`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from hwopt.configs.view import ConfigSetting, View
from hwopt.hardware.device import Hardware

__all__ = ["ConfigSetting", "Facts", "Finding", "Level", "Rule", "View", "rule"]

Tools = tuple[str, ...]  # of rows also a class that a script calls, or a file is for, such as KTOConfig
TRANSFORMERS: Tools = ("transformers", "llama-factory")
"""The tools whose keys are the names of TrainingArguments."""
TRAINERS: Tools = ("transformers", "axolotl", "llama-factory")
"""The tools that train with transformers' Trainer."""
Level = Literal["error", "warning", "information"]
Need = Literal["card", "cores", "size"]
NEEDS: dict[Need, str] = {
    "card": "a card (--card NAME, or --profile)",
    "cores": "the number of CPU cores (--cores N)",
    "size": "the model's size and the length of a sample (--parameters N --max-length N)",
}


@dataclass(frozen=True)
class Facts:
    """What a configuration does not say and a rule may need. None: unknown."""

    hardware: Hardware | None = None
    cores: int | None = None
    rows: int | None = None
    parameters: float | None = None
    max_length: int | None = None
    """Tokens of the longest sample."""

    def lacks(self, need: Need) -> bool:
        if need == "size":
            return self.parameters is None or self.max_length is None
        return (self.hardware if need == "card" else self.cores) is None


@dataclass(frozen=True)
class Finding:
    """One mistake. `what` is the fact with its values, `why` its effect, `fix` the exact setting.

    What a rule leaves open, `check` fills in: the level from the rule, place and key from the setting `word`.
    """

    word: str
    """The setting that it is about: a word of the view. "": the whole file, or the `place`."""
    what: str
    why: str
    fix: str = ""
    level: Level | None = None
    place: str = ""
    key: str = ""
    rule: str = ""


RuleFunction = Callable[[View, Facts], Iterable[Finding]]


@dataclass(frozen=True)
class Rule:
    """A function that finds one kind of mistake, and what the documentation says about it."""

    name: str
    level: Level
    about: str
    source: str
    function: RuleFunction
    words: tuple[str, ...] = ()
    """The rule is asked only if the file has one of these settings; (): always."""
    needs: tuple[Need, ...] = ()
    tools: Tools = ()
    """The tools that it is about; (): all."""

    def concerns(self, view: View) -> bool:
        return (not self.tools or view.tool in self.tools) and (not self.words or any(map(view.found, self.words)))


def rule(
    name: str, level: Level, *, source: str, words: tuple[str, ...] = (), needs: tuple[Need, ...] = (), tools: Tools = ()
) -> Callable[[RuleFunction], Rule]:
    """Decorator: a Rule of the function, which `about` describes by the first line of its docstring."""

    def made(function: RuleFunction) -> Rule:
        return Rule(name, level, (function.__doc__ or "").strip().partition("\n")[0], source, function, words, needs, tools)

    return made
