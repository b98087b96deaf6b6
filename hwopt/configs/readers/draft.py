"""A view while a reader fills it: settings by word, and what has none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hwopt.configs.source_file import Entry, SourceFile
from hwopt.configs.view import ConfigSetting, Tool, Unread, View
from hwopt.configs.words import NotReadable, typed


class Draft:
    """Collects the settings of one file. The first entry for a word counts; a second one is listed as unread."""

    def __init__(self, source: SourceFile) -> None:
        self.source = source
        self.settings: dict[str, ConfigSetting] = {}
        self.unread: list[Unread] = [
            Unread(entry.key, entry.value, self.place(entry), "a later line gives the same key", "replaced", entry.comments)
            for entry in source.replaced
        ]

    def place(self, entry: Entry) -> str:
        return f"{self.source.name}:{entry.line}"

    def add(self, word: str, entry: Entry, value: Any = ...) -> None:
        """Set `word` to the value of `entry`, or to `value`, which a reader made of it."""
        if entry.interpolated:
            self.leave(entry, "")
            return
        doubt = ""
        try:
            found = typed(word, entry.value if value is ... else value)
        except NotReadable as error:
            self.leave(entry, str(error), "unreadable")
            if error.guess is None or word in self.settings:
                return
            found, doubt = error.guess, str(error)
        if found is None:
            self.leave(entry, "has no value", "other")
            return
        if (first := self.settings.get(word)) is not None:
            self.leave(entry, f"{first.key} ({first.place}) says the same thing and comes first", "other")
            return
        self.settings[word] = ConfigSetting(
            word,
            found,
            entry.key,
            self.place(entry),
            entry.comment,
            entry.above,
            entry.below,
            tuple(self.former(entry, word)),
            doubt,
        )

    def imply(self, word: str, value: Any, by: ConfigSetting) -> None:
        """Set `word` to a value that the tool implies; `by` is the setting whose place it gets."""
        self.settings.setdefault(word, replace(by, word=word, value=value, comment="", above=(), below=(), former=()))

    def former(self, entry: Entry, word: str) -> list[Any]:
        found = []
        for before in self.source.replaced:
            if before.path == entry.path:
                try:
                    found.append(typed(word, before.value))
                except NotReadable:
                    continue
        return found

    def leave(self, entry: Entry, reason: str, kind: Any = "unknown") -> None:
        """List `entry` as unread."""
        if entry.interpolated:
            reason, kind = "refers to another value, which only the tool that made the file resolves", "interpolation"
        self.unread.append(Unread(entry.key, entry.value, self.place(entry), reason, kind, entry.comments))

    def view(self, tool: Tool, recognised_by: str, spelling: Callable[[str], str] = str) -> View:
        source = self.source
        return View(
            source.name,
            tool,
            recognised_by,
            source.language,
            self.settings,
            tuple(self.unread),
            loose=source.loose,
            spelling=spelling,
        )
