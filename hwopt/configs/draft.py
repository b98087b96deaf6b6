"""A view while a reader fills it, and the table by which a reader knows the keys of its tool."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hwopt.configs.source_file import Entry, SourceFile
from hwopt.configs.view import ConfigSetting, Tool, Unread, UnreadKind, View
from hwopt.configs.words import NotReadable, typed, word_of

TRAINER_SAYS = "the arguments of the trainer say it"


class Draft:
    """Collects the settings of one file. The first entry for a word counts."""

    def __init__(self, source: SourceFile) -> None:
        self.source = source
        self.settings: dict[str, ConfigSetting] = {}
        self.unread: list[Unread] = []
        for entry in source.replaced:
            self.leave(entry, "a later line gives the same key", "replaced")

    def place(self, entry: Entry) -> str:
        return f"{self.source.name}:{entry.line}"

    def add(self, word: str, entry: Entry, value: Any = ...) -> None:
        """Set `word` to the value of `entry`, or to `value`, which a reader made of it."""
        if entry.interpolated:
            self.leave(entry, "", word=word)
            return
        doubt = ""
        try:
            found = typed(word, entry.value if value is ... else value)
        except NotReadable as error:
            self.leave(entry, str(error), "unreadable", word)
            if error.guess is None or word in self.settings:
                return
            found, doubt = error.guess, str(error)
        if found is None:
            self.leave(entry, "has no value", "other")
        elif (first := self.settings.get(word)) is not None:
            said = f"{first.key} ({first.place}) says the same thing and comes first"
            self.leave(entry, said, "other")
        else:
            comments = (entry.comment, entry.above, entry.below)
            former = tuple(self.former(entry, word))
            place = self.place(entry)
            self.settings[word] = ConfigSetting(word, found, entry.key, place, *comments, former, doubt)

    def imply(self, word: str, value: Any, by: ConfigSetting) -> None:
        """Set `word` to a value that the tool implies; `by` is the setting whose place it gets."""
        bare = replace(by, word=word, value=value, comment="", above=(), below=(), former=())
        self.settings.setdefault(word, bare)

    def former(self, entry: Entry, word: str) -> list[Any]:
        """The values that earlier lines of the file give to the same key."""
        found = []
        for before in self.source.replaced:
            if before.path == entry.path:
                try:
                    found.append(typed(word, before.value))
                except NotReadable:
                    continue
        return found

    def leave(self, entry: Entry, reason: str, kind: UnreadKind = "unknown", word: str = "") -> None:
        """List `entry` as unread."""
        if entry.interpolated:
            kind = "interpolation"
            reason = "refers to another value, which only the program that reads the file knows"
        place = self.place(entry)
        self.unread.append(Unread(entry.key, entry.value, place, reason, kind, entry.comments, word))

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


Values = Mapping[Any, Any]
Special = Callable[[Draft, Entry], None]


@dataclass(frozen=True)
class Dialect:
    """The keys of a tool that have other names or other values than in TrainingArguments."""

    tool: Tool
    telling: frozenset[str]
    """Keys of the outermost table that no other tool has. One of them decides."""
    keys: Mapping[str, str | tuple[str, Values]]
    """Key -> its word, or its word and the values that mean something else there."""
    reasons: Mapping[str, str]
    """Key, or the table that it is in -> why it is left out."""
    unknown: str
    """Why other keys are left out."""
    special: Mapping[str, Special] = field(default_factory=dict)
    """Key -> a function for a key that needs more than its word."""
    arguments: bool = False
    """Whether the names of TrainingArguments are keys of the tool too."""
    finish: Callable[[Draft], None] | None = None
    """Called after the last entry."""

    def read(self, source: SourceFile, recognised_by: str) -> View:
        """The view of a file of this tool."""
        draft = Draft(source)
        for entry in source.entries:
            self.take(draft, entry)
        if self.finish is not None:
            self.finish(draft)
        return draft.view(self.tool, recognised_by, self.spelling)

    def take(self, draft: Draft, entry: Entry) -> None:
        reason = self.reasons.get(entry.key) or self.reasons.get(entry.path[0])
        word: Any = self.keys.get(entry.key) or (word_of(entry.key) if self.arguments else None)
        if entry.value == "auto" and not self.arguments:
            draft.leave(entry, TRAINER_SAYS, "other")
        elif entry.key in self.special:
            self.special[entry.key](draft, entry)
        elif isinstance(word, str):
            draft.add(word, entry)
        elif word is not None and isinstance(entry.value, list | dict):
            draft.add(word[0], entry)
        elif word is not None:
            value = word[1].get(entry.value, entry.value)
            if isinstance(value, Left):
                draft.leave(entry, value.reason, value.kind)
            else:
                draft.add(word[0], entry, value)
        elif reason is not None:
            draft.leave(entry, reason, "other")
        elif entry.value is None:
            draft.leave(entry, "has no value", "other")
        else:
            draft.leave(entry, self.unknown)

    def spelling(self, word: str) -> str:
        """The tool's key for `word`."""
        for key, found in self.keys.items():
            if found == word:
                return key
        return word


@dataclass(frozen=True)
class Left:
    """A value that is left out, with the reason."""

    reason: str
    kind: UnreadKind = "other"
