"""A view while a reader fills it: settings by word, and what has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hwopt.interop.source_file import Entry, SourceFile
from hwopt.interop.view import Setting, Tool, Unread, View
from hwopt.interop.words import NotReadable, typed


class Draft:
    """Collects the settings of one file. The first entry for a word counts; a second one is listed as unread."""

    def __init__(self, source: SourceFile) -> None:
        self.source = source
        self.settings: dict[str, Setting] = {}
        self.unread: list[Unread] = [
            Unread(entry.key, entry.value, self.place(entry), "a later line gives the same key", "replaced", comments_of(entry))
            for entry in source.replaced
        ]

    def place(self, entry: Entry) -> str:
        return f"{self.source.name}:{entry.line}"

    def add(self, word: str, entry: Entry, value: Any = ...) -> None:
        """Set `word` to the value of `entry`, or to `value`, which a reader made of it."""
        if entry.interpolated:
            self.leave(entry, "")
            return
        try:
            found = typed(word, entry.value if value is ... else value)
        except NotReadable as error:
            self.leave(entry, str(error), "unreadable")
            return
        if found is None and entry.value in (None, ""):
            self.leave(entry, "has no value", "other")
            return
        if (first := self.settings.get(word)) is not None:
            self.leave(entry, f"{first.key} ({first.place}) says the same thing and comes first", "other")
            return
        self.settings[word] = Setting(
            word, found, entry.key, self.place(entry), entry.comment, entry.above, tuple(self.former(entry, word))
        )

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
        self.unread.append(Unread(entry.key, entry.value, self.place(entry), reason, kind, comments_of(entry)))

    def view(self, tool: Tool, recognised_by: str, spelling: Callable[[str], str] = str) -> View:
        source = self.source
        return View(
            source.name,
            tool,
            recognised_by,
            source.language,
            self.settings,
            tuple(self.unread),
            comments=source.comments or {},
            spelling=spelling,
        )


def comments_of(entry: Entry) -> tuple[str, ...]:
    return (*entry.above, *([entry.comment] if entry.comment else []))
