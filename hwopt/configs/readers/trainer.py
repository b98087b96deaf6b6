"""TrainingArguments as YAML or JSON, of any version of transformers, flat or nested by Hydra; and names of common scripts."""

from __future__ import annotations

from hwopt.configs.readers.draft import Draft
from hwopt.configs.source_file import Entry, SourceFile
from hwopt.configs.view import View
from hwopt.configs.words import ARGUMENTS, FORMER_NAMES, SYNONYMS, word_of

EVALUATION_TABLES = ("eval", "evaluation", "validation", "valid", "val", "test")
EVALUATION_WORDS = {"per_device_train_batch_size": "per_device_eval_batch_size"}
"""Word -> the word for the same name in a table about evaluation."""
OTHER_LISTS = {
    "defaults": "Hydra's list of further files; only this file is read",
    "hydra": "a setting of Hydra itself",
}


def signature(source: SourceFile) -> frozenset[str]:
    """The names in `source` that TrainingArguments has or had, and, if there are none, those of common scripts."""
    arguments = source.leaves & (ARGUMENTS | FORMER_NAMES.keys())
    return arguments or source.leaves & SYNONYMS.keys()


def read(source: SourceFile, recognised_by: str) -> View:
    draft = Draft(source)
    for entry in source.entries:
        word = word_at(entry)
        if entry.path[0] in OTHER_LISTS:
            draft.leave(entry, OTHER_LISTS[entry.path[0]], "other")
        elif word is None:
            draft.leave(entry, "no name of TrainingArguments")
        elif word == "train_sampling_strategy":
            draft.add("group_by_length", entry, entry.value == "group_by_length")
        else:
            draft.add(word, entry)
    return draft.view("transformers", recognised_by, lambda word: spelled(word, source))


def word_at(entry: Entry) -> str | None:
    """The word for an entry: of its last part, or of the part that has a word with the parts below it."""
    for depth, part in enumerate(entry.path):
        below = ".".join(entry.path[depth + 1 :])
        full = f"{part}.{below}" if below else part
        if (word := word_of(full)) is not None:
            in_evaluation = any(table in EVALUATION_TABLES for table in entry.path[:depth])
            return EVALUATION_WORDS.get(word, word) if in_evaluation else word
        if below and part in ARGUMENTS and word_of(entry.path[-1]) is None:
            return full
    return None


def spelled(word: str, source: SourceFile) -> str:
    """`word` in the table in which the file has most of its arguments."""
    arguments = [entry for entry in source.entries if entry.path[-1] in ARGUMENTS]
    tables = [entry.path[:-1] for entry in arguments or source.entries if word_at(entry)]
    usual = max(dict.fromkeys(tables), key=tables.count, default=())
    return ".".join((*usual, word))
