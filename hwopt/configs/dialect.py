"""Dialect: how a tool spells the settings that all tools share, and the view of its files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hwopt.configs.source_file import Entry, SourceFile
from hwopt.configs.view import Omitted, Tool, View
from hwopt.configs.words import word_of

Values = Mapping[Any, Any]
Special = Callable[[View, Entry], None]
NOTHING = (None, "none", "None", False)
"""Values of a key that is not set."""


@dataclass(frozen=True)
class Dialect:
    """The keys of a tool that have other names or other values than in TrainingArguments."""

    tool: Tool
    telling: frozenset[str]
    """Keys of the outermost table that no other tool has. One of them decides."""
    keys: Mapping[str, str | tuple[str, Values] | Special]
    """Key -> its word; its word and the values that mean something else there; or a function that reads it."""
    reasons: Mapping[str, str]
    """Key, or the table that it is in -> why it is left out."""
    unknown: str
    """Why other keys are left out."""
    arguments: bool = False
    """Whether the names of TrainingArguments are keys of the tool too."""
    finish: Callable[[View], None] = lambda view: None
    """Called after the last entry."""

    def read(self, source: SourceFile, recognised_by: str) -> View:
        """The view of a file of this tool."""
        view = View(source, self.tool, recognised_by, self.spelling)
        for entry in source.entries:
            self.take(view, entry)
        self.finish(view)
        return view

    def take(self, view: View, entry: Entry) -> None:
        found = self.keys.get(entry.key) or (word_of(entry.key) if self.arguments else None)
        if entry.value == "auto" and not self.arguments:
            view.leave(entry, "the arguments of the trainer say it", "other")
        elif callable(found):
            found(view, entry)
        elif found is None:
            empty = "has no value" if entry.value is None else ""
            reason = self.reasons.get(entry.key) or self.reasons.get(entry.path[0]) or empty
            view.leave(entry, reason or self.unknown, "other" if reason else "unknown")
        else:
            word, meant = (found, {}) if isinstance(found, str) else found
            value = entry.value if isinstance(entry.value, list | dict) else meant.get(entry.value, entry.value)
            if isinstance(value, Omitted):
                view.leave(entry, *value)
            else:
                view.add(word, entry, value)

    def spelling(self, word: str) -> str:
        """The tool's key for `word`."""
        return next((key for key, found in self.keys.items() if found == word), word)
