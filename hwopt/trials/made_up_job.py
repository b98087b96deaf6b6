"""A job with made-up rows for the model of a profile (`[tuned_for]`): every row fills the length. Speed and memory do not
depend on what the rows say.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomlkit

from hwopt.config.profile import Profile
from hwopt.errors import InputError
from hwopt.memory.lengths import DEFAULT_LENGTH
from hwopt.memory.reference import reference_job

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
LABELS = ("a", "b")
ROWS = 512
"""Rows that are made up; a trial repeats them if it trains more."""
KINDS = ("text-classification", "causal-lm")
"""Tasks for which rows can be made up."""


def write_made_up_job(profile: Profile, folder: Path) -> Path:
    """Write a job for the model that `profile` is tuned for, its rows and a tokenizer to `folder`; returns the path of the job.

    Raises InputError if the profile names no model, or a task for which no rows can be made up.
    """
    job = reference_job(profile).job
    kind, length, config = job.task.kind, job.data.max_length or DEFAULT_LENGTH, dict(job.model.config or {})
    if kind not in KINDS:
        raise InputError(f"{profile.document.name}: rows cannot be made up for the task {kind}, only for {', '.join(KINDS)}")
    folder.mkdir(parents=True, exist_ok=True)
    from hwopt.model.config import load_config

    words = load_config(None, config).get_text_config().vocab_size - len(SPECIAL)
    write_tokenizer(folder / "tokenizer", words)
    write_rows(folder / "train.jsonl", words, length, labelled=kind == "text-classification")
    columns: Mapping[str, Any] = {"text": ["text"], "label": "label"} if kind == "text-classification" else {"text": ["text"]}
    document = {
        "model": {"config": config, "tokenizer": str(folder / "tokenizer")},
        "data": {"train": str(folder / "train.jsonl"), "max_length": length, **columns},
        "task": {"kind": kind},
    }
    path = folder / "job.toml"
    path.write_text(tomlkit.dumps(document), encoding="utf-8")
    return path


def write_rows(path: Path, words: int, length: int, *, labelled: bool) -> None:
    """Write ROWS texts of `length` words, of a vocabulary of `words`."""
    draw = random.Random(0)
    with open(path, "w", encoding="utf-8") as file:
        for number in range(ROWS):
            row = {"text": " ".join(f"w{draw.randrange(words)}" for _ in range(length))}
            if labelled:
                row["label"] = LABELS[number % len(LABELS)]
            file.write(json.dumps(row) + "\n")


def write_tokenizer(folder: Path, words: int) -> None:
    """Write a tokenizer to `folder` that gives each of the words w0, w1 … one token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *(f"w{number}" for number in range(words))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    pad, unknown, first, last, mask = SPECIAL
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        unk_token=unknown,
        cls_token=first,
        sep_token=last,
        eos_token=last,
        mask_token=mask,
    ).save_pretrained(folder)
