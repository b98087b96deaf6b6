"""Names and values that are not read: former names, misspelled names, text where a number belongs, keys that are given twice."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches

from hwopt.configs.check.contract import TRANSFORMERS, Facts, Finding, rule
from hwopt.configs.source_file import Entry
from hwopt.configs.view import View
from hwopt.configs.words import ARGUMENTS, DEPRECATED_NAMES, FORMER_NAMES
from hwopt.text import truncate

ALIKE = 0.85
"""How similar a key must be to a name to count as misspelled; other keys may be the program's own."""


def about(entry: Entry, what: str, why: str, fix: str = "") -> Finding:
    return Finding("", what, why, fix, place=entry.place, key=entry.key)


@rule("former-name", "warning", source="release notes of transformers", tools=TRANSFORMERS)
def former_name(view: View, facts: Facts) -> Iterator[Finding]:
    """A name that transformers no longer has."""
    for each in (*view.settings.values(), *view.unread):
        if (name := each.path[-1]) in FORMER_NAMES and name != "fp16_opt_level":  # it has a rule of its own
            instead, gone = FORMER_NAMES[name]
            why = "TrainingArguments stops at an unknown name; programs that read the file themselves may ignore it."
            yield about(each, f"transformers {gone} has no {name}.", why, f"use {instead}" if instead else f"remove {name}")


@rule("deprecated-name", "information", source="transformers 5.23, TrainingArguments", tools=TRANSFORMERS)
def deprecated_name(view: View, facts: Facts) -> Iterator[Finding]:
    """A name that the next version of transformers will not have."""
    for each in view.settings.values():
        for name in DEPRECATED_NAMES.keys() & set(each.path):
            instead, gone = DEPRECATED_NAMES[name]
            why = "Version 5 accepts it with a warning; version 4 knows no other name."
            yield about(each, f"transformers {gone} will have no {name}.", why, f"with version 5 use {instead}")


@rule("misspelled-name", "warning", source="unsloth#10452: a key that no program reads", tools=TRANSFORMERS)
def misspelled_name(view: View, facts: Facts) -> Iterator[Finding]:
    """A key that is almost a name of TrainingArguments."""
    for each in view.unread:
        name = each.path[-1]
        if each.kind != "unknown" or name in FORMER_NAMES or (view.language == "Python" and len(each.path) > 1):
            continue
        if near := get_close_matches(name[:80], ARGUMENTS, n=1, cutoff=ALIKE):
            why = "A value that no program reads has no effect."
            yield about(each, f"TrainingArguments has no {name}.", why, f"use {near[0]}")


@rule("not-a-value", "error", source='notes.md#rtx-3070-16-or-32-rows: "16  ← Actually 16, not 96!"')
def not_a_value(view: View, facts: Facts) -> Iterator[Finding]:
    """A value of the wrong type, such as text behind a number."""
    for each in view.unread_as("unreadable"):
        what = f"{each.key} = {truncate(each.value)}: {each.reason}"
        yield about(each, what, "The trainer stops, or reads a text.", "correct the value")


@rule("key-twice", "warning", source="notes.md#rtx-3070-48-rows: the file before and after in one block")
def key_twice(view: View, facts: Facts) -> Iterator[Finding]:
    """A key that the file gives twice; the last one counts."""
    for each in view.unread_as("replaced"):
        what = f"{each.key} = {truncate(each.value)} is replaced by a later line."
        yield about(each, what, "The last one counts, without a message.", "remove one of the two")


@rule("interpolation", "information", source="Hydra and OmegaConf; names of a script")
def interpolation(view: View, facts: Facts) -> Iterator[Finding]:
    """A value that refers to another one, which no rule can read."""
    for each in view.unread_as("interpolation"):
        if each.word != "use_peft":  # known from an import, not a line that the user could change
            what = f"{each.key} = {truncate(each.value)} is not resolved, and not checked."
            yield about(each, what, "Only the program that reads the file knows the value.")
