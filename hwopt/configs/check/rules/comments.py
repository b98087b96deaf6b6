"""Comments that say another value than the file sets. Readers believe the comment; the run takes the value."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hwopt.configs.check import Facts, Finding, rule
from hwopt.configs.check.rules.batch import ACCUMULATION, EVAL, TRAIN
from hwopt.configs.view import ConfigSetting, View

CONTRAST = r"(?<!than )(?<!instead of )(?<!from )(?<!was )(?<!not )(?<!old )(?<!with )(?<!for )(?<!previous )"
CHANGED = re.compile(
    r"\b(?:push(?:ed|ing)?|increas(?:ed|ing)|rais(?:ed|ing)|reduc(?:ed|ing)|lower(?:ed|ing)|set|chang(?:ed|ing))\s+(?:\w+\s+)?to\s+(\d+)\b",
    re.IGNORECASE,
)
BATCH = re.compile(CONTRAST + r"\bbatch(?:[ _]size)?\s*(?:of|=|:|is)?\s*(\d+)\b(?!\s*-\s*\d)", re.IGNORECASE)
EFFECTIVE = re.compile(
    r"\beffective(?:\s+batch)?(?:\s+size)?(?:\s+(?:still|is|of|stays|at))*\s*[=:]?\s*(?:\d+\s*[*x×]\s*\d+\s*=\s*)?(\d+)\b(?!\s*[*x×])",
    re.IGNORECASE,
)
TIMES_TRAIN = re.compile(r"\b(\d+)\s*x\s+(?:the\s+)?train", re.IGNORECASE)
WORKERS = re.compile(CONTRAST + r"\b(\d+)\s+workers\b", re.IGNORECASE)
PERCENT = re.compile(r"^[^%\d]*(\d+(?:\.\d+)?)\s*%[^%]*$")
VALUES = {TRAIN: BATCH, "dataloader_num_workers": WORKERS}
"""Word -> how a comment states its value."""
CONDITION = re.compile(r"\b(if|or|could|would|may|can)\b", re.IGNORECASE)
"""A comment with such a word names an alternative."""
SAVES = re.compile(r"\b(oom|out of memory|memory|vram)\b", re.IGNORECASE)


@rule("comment-value", "warning", source="notes.md#rtx-3070-16-or-32-rows: comments say 96, the file sets 16")
def comment_value(view: View, facts: Facts) -> Iterator[Finding]:
    """A comment says another value than the line below or before it."""
    for setting in view.settings.values():
        for comment in setting.comments:
            for said, actual, unit in claims(setting, comment, view):
                if said != actual:
                    line = "" if unit else f", or {view.line(setting.word, int(said))}"
                    what = f'The comment "{comment[:80]}" says {said:g}{unit}; the file sets {actual:g}.'
                    why = "Readers believe the comment, and the run takes the value."
                    yield Finding(setting.word, what, why, f"correct the comment{line}")


def claims(setting: ConfigSetting, comment: str, view: View) -> Iterator[tuple[float, float, str]]:
    """(said, actual, unit) for each value that a comment of `setting` states."""
    value, word = view.number(setting.word), setting.word
    if word in (TRAIN, ACCUMULATION, EVAL) and (found := EFFECTIVE.search(comment)):
        if view.effective_rows is not None and ACCUMULATION in view:
            yield int(found[1]), view.effective_rows, " rows in a step"
    elif CONDITION.search(comment) or value is None:
        return
    elif word in VALUES and (found := CHANGED.search(comment) or VALUES[word].search(comment)):
        yield int(found[1]), value, ""
    elif word == EVAL and (found := TIMES_TRAIN.search(comment)) and view.train_rows:
        yield int(found[1]) * view.train_rows, value, ""
    elif word == "warmup_ratio" and (found := PERCENT.match(comment)):
        yield float(found[1]), round(100 * value, 6), " percent"


@rule("checkpointing-off-for-memory", "warning", words=("gradient_checkpointing",), source="notes.md#t4")
def checkpointing_off_for_memory(view: View, facts: Facts) -> Iterator[Finding]:
    """A comment says that memory is saved by turning activation checkpointing off; it needs more."""
    setting = view.settings["gradient_checkpointing"]
    if setting.value is False and any(SAVES.search(comment) for comment in setting.comments):
        what = f"{setting.key} is false, and the comment gives memory as the reason."
        why = "Checkpointing saves memory and costs time: without it every layer keeps its activations."
        yield Finding(setting.word, what, why, view.line(setting.word, True))
