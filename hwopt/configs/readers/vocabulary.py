"""Vocabulary: which of a tool's keys are words of TrainingArguments, and why others have no counterpart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hwopt.configs.readers.draft import Draft
from hwopt.configs.source_file import Entry
from hwopt.configs.words import word_of


@dataclass(frozen=True)
class Vocabulary:
    """The keys of a tool that have other names than in TrainingArguments."""

    keys: Mapping[str, str]
    """Key -> word; "" for a key without a word of its own."""
    reasons: Mapping[str, str]
    """Key -> why it is left out."""

    def word(self, key: str) -> str | None:
        """The word for `key`: of the tool, else of TrainingArguments; None without one."""
        return self.keys.get(key) or word_of(key)

    def spelling(self, word: str) -> str:
        """The tool's key for `word`."""
        return next((key for key, found in self.keys.items() if found == word), word)

    def take(self, draft: Draft, entry: Entry) -> bool:
        """Add or leave an entry that needs no more than its word; False for one that has none."""
        word = self.word(entry.key)
        if entry.key in self.reasons:
            draft.leave(entry, self.reasons[entry.key], "other")
        elif word:
            draft.add(word, entry)
        return bool(word) or entry.key in self.reasons
