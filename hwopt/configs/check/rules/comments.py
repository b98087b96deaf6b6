"""Comments and summaries that say another value than the file sets. Readers believe the comment; the run takes the value."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hwopt.configs.check.contract import Facts, Finding, rule
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
CONDITION = re.compile(r"\b(if|or|could|would|may|can)\b", re.IGNORECASE)
"""A comment with such a word names an alternative."""


@rule("comment-value", "warning", source="notes.md#rtx-3070-16-or-32-rows: comments say 96, the file sets 16")
def comment_value(view: View, facts: Facts) -> Iterator[Finding]:
    """A comment says another value than the line below or before it."""
    for setting in view.settings.values():
        for comment in setting.comments:
            for said, actual, what in claims(setting, comment, view):
                if said != actual:
                    yield Finding(
                        setting.word,
                        f'The comment "{comment[:80]}" says {said:g}{what}; the file sets {actual:g}.',
                        "Readers believe the comment, and the run takes the value.",
                        f"correct the comment, or {view.line(setting.word, int(said))}" if what == "" else "correct the comment",
                    )


def claims(setting: ConfigSetting, comment: str, view: View) -> Iterator[tuple[float, float, str]]:
    """(said, actual, unit) for each value that a comment of `setting` states."""
    if setting.word in (TRAIN, ACCUMULATION, EVAL) and (found := EFFECTIVE.search(comment)):
        if view.effective_rows is not None and ACCUMULATION in view:
            yield int(found[1]), view.effective_rows, " rows in a step"
        return
    if CONDITION.search(comment) or (value := view.number(setting.word)) is None:
        return
    if setting.word == TRAIN and (found := CHANGED.search(comment) or BATCH.search(comment)):
        yield int(found[1]), value, ""
    elif setting.word == EVAL and (found := TIMES_TRAIN.search(comment)) and view.train_rows:
        yield int(found[1]) * view.train_rows, value, ""
    elif setting.word == "dataloader_num_workers" and (found := CHANGED.search(comment) or WORKERS.search(comment)):
        yield int(found[1]), value, ""
    elif setting.word == "warmup_ratio" and (found := PERCENT.match(comment)):
        yield float(found[1]), round(100 * value, 6), " percent"


PRODUCT = re.compile(r"\b(\d+)\s*[x×]\s*(\d+)\b(?!\s*(?:tokens|GB|GiB))")
DTYPES = ("fp16", "bf16", "fp32")


@rule(
    "summary-value", "warning", source="a profile whose summary said 32 x 4 and whose table set 64 x 2", tools=("hwopt-profile",)
)
def summary_value(view: View, facts: Facts) -> Iterator[Finding]:
    """The summary of a profile says another value than the profile sets."""
    for place, text in view.texts.items():
        for said, actual, word in summary_claims(text, view):
            yield Finding(
                word,
                f'The summary "{text[:80]}" says {said}; the profile sets {actual}.',
                "`hwopt profiles` shows the summary, and a run takes the values.",
                f"correct the summary: {actual}",
                place=place,
                key="summary",
            )


def summary_claims(text: str, view: View) -> Iterator[tuple[str, str, str]]:
    """(said, actual, word) for each part of a summary that is wrong."""
    train, steps = view.number(TRAIN), view.number(ACCUMULATION) or 1
    if train and (found := PRODUCT.search(text)) and (int(found[1]), int(found[2])) != (train, steps):
        yield found[0], f"{train:g} x {steps:g}", TRAIN
    elif train and (found := BATCH.search(text)) and int(found[1]) != train:
        yield found[0], f"batch {train:g}", TRAIN
    dtype = view.value("mixed_precision")
    said = [name for name in DTYPES if re.search(rf"\b{name}\b", text)]
    if dtype in DTYPES and said and dtype not in said:
        yield said[0], str(dtype), "mixed_precision"
    if re.search(r"\b8-bit Adam", text) and "8bit" not in str(view.value("optim", "8bit")):
        yield "8-bit Adam", str(view.value("optim")), "optim"
    workers = view.number("dataloader_num_workers")
    if workers is not None and (found := WORKERS.search(text)) and int(found[1]) != workers:
        yield found[0], f"{workers:g} workers", "dataloader_num_workers"


SAVES = re.compile(r"\b(oom|out of memory|memory|vram)\b", re.IGNORECASE)


@rule("checkpointing-off-for-memory", "warning", words=("gradient_checkpointing",), source="notes.md#t4")
def checkpointing_off_for_memory(view: View, facts: Facts) -> Iterator[Finding]:
    """A comment says that memory is saved by turning activation checkpointing off; it needs more."""
    setting = view.settings["gradient_checkpointing"]
    if setting.value is False and any(SAVES.search(comment) for comment in setting.comments):
        yield Finding(
            setting.word,
            f"{setting.key} is false, and the comment gives memory as the reason.",
            "Checkpointing saves memory and costs time: without it every layer keeps its activations.",
            view.line(setting.word, True),
        )
