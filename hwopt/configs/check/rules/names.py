"""Names and values that are not read: former names, misspelled names, text where a number belongs, keys that are given twice."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches

from hwopt.configs.check.contract import Facts, Finding, rule
from hwopt.configs.view import Tool, Unread, View
from hwopt.configs.words import ARGUMENTS, DEPRECATED_NAMES, FORMER_NAMES
from hwopt.text import truncate

NAMED: tuple[Tool, ...] = ("transformers", "llama-factory")
ALIKE = 0.85
"""How similar a key must be to a name to count as misspelled; other keys may be the program's own."""


def unread_as(view: View, kind: str) -> Iterator[Unread]:
    """The keys of the file that were not read for the reason `kind`."""
    return (each for each in view.unread if each.kind == kind)


def about(unread: Unread, what: str, why: str, fix: str = "") -> Finding:
    return Finding("", what, why, fix, place=unread.place, key=unread.key)


@rule("former-name", "warning", source="release notes of transformers", tools=NAMED)
def former_name(view: View, facts: Facts) -> Iterator[Finding]:
    """A name that transformers no longer has."""
    found = [(each.key, each.place) for each in view.settings.values()] + [(each.key, each.place) for each in view.unread]
    for key, place in found:
        name = key.rsplit(".", 1)[-1]
        if name in FORMER_NAMES and name != "fp16_opt_level":  # it has a rule of its own
            instead, gone = FORMER_NAMES[name]
            yield Finding(
                "",
                f"transformers {gone} has no {name}.",
                "TrainingArguments stops at an unknown name; programs that read the file themselves may ignore it.",
                f"use {instead}" if instead else f"remove {name}",
                place=place,
                key=key,
            )


@rule("deprecated-name", "information", source="transformers 5.23, TrainingArguments", tools=NAMED)
def deprecated_name(view: View, facts: Facts) -> Iterator[Finding]:
    """A name that the next version of transformers will not have."""
    for setting in view.settings.values():
        name = next((part for part in setting.key.split(".") if part in DEPRECATED_NAMES), None)
        if name is not None:
            instead, gone = DEPRECATED_NAMES[name]
            yield Finding(
                setting.word,
                f"transformers {gone} will have no {name}.",
                "Version 5 accepts it with a warning; version 4 knows no other name.",
                f"with version 5 use {instead}",
            )


@rule("misspelled-name", "warning", source="unsloth#10452: a key that no program reads", tools=NAMED)
def misspelled_name(view: View, facts: Facts) -> Iterator[Finding]:
    """A key that is almost a name of TrainingArguments."""
    for each in unread_as(view, "unknown"):
        name = each.key.rsplit(".", 1)[-1]
        near = get_close_matches(name[:80], ARGUMENTS, n=1, cutoff=ALIKE)
        if near and name not in FORMER_NAMES and not (view.language == "Python" and "." in each.key):
            yield about(
                each,
                f"TrainingArguments has no {name}.",
                "A value that no program reads has no effect.",
                f"use {near[0]}",
            )


@rule("not-a-value", "error", source='notes.md#rtx-3070-16-or-32-rows: "16  ← Actually 16, not 96!"')
def not_a_value(view: View, facts: Facts) -> Iterator[Finding]:
    """A value of the wrong type, such as text behind a number."""
    for each in unread_as(view, "unreadable"):
        yield about(
            each,
            f"{each.key} = {truncate(each.value)}: {each.reason}",
            "The trainer stops, or reads a text.",
            "correct the value",
        )


@rule("key-twice", "warning", source="notes.md#rtx-3070-48-rows: the file before and after in one block")
def key_twice(view: View, facts: Facts) -> Iterator[Finding]:
    """A key that the file gives twice; the last one counts."""
    for each in unread_as(view, "replaced"):
        yield about(
            each,
            f"{each.key} = {truncate(each.value)} is replaced by a later line.",
            "The last one counts, without a message.",
            "remove one of the two",
        )


@rule("interpolation", "information", source="Hydra and OmegaConf; names of a script")
def interpolation(view: View, facts: Facts) -> Iterator[Finding]:
    """A value that refers to another one, which no rule can read."""
    why = "Only a run of the script knows the value." if view.language == "Python" else "Only Hydra knows the value."
    for each in unread_as(view, "interpolation"):
        if each.word != "use_peft":  # known from an import, not a line that the user could change
            yield about(each, f"{each.key} = {truncate(each.value)} is not resolved, and not checked.", why)
