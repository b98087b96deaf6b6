"""Rows with labels for each task that labels samples or tokens, and a conversation."""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hwopt.config.job import Job, make_job
from hwopt.config.toml import Document
from hwopt.model.config import load_config
from hwopt.tasks.prepared import Prepared
from hwopt.tasks.registry import make_task
from hwopt.testing import TINY_BERT, TINY_LLAMA, WORDS

LABELLED: dict[str, dict[str, Any]] = {
    "regression": {"label": ["score", "other"]},
    "multi-label-classification": {"label": "labels"},
    "token-classification": {"text": "tokens", "label": "tags"},
}
MESSAGES = [
    {"role": "user", "content": "Hello?"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4"},
]


def write_rows(path: Path, number: int) -> Path:
    """`path`, a JSONL file with columns for every task of LABELLED."""
    draw = random.Random(0)
    with path.open("w") as file:
        for _ in range(number):
            words = draw.choices(WORDS, k=draw.randint(2, 24))
            row = {"text": " ".join(words), "tokens": words, "tags": ["B-X" if len(word) > 3 else "O" for word in words]}
            numbers = {"score": len(words) / 24, "other": draw.random()}
            file.write(json.dumps(row | numbers | {"labels": sorted({word[0] for word in words if word[0] in "rgb"})}) + "\n")
    return path


def write_jsonl(path: Path, rows: Iterable[Any]) -> str:
    """`path`, a file with one of `rows` on each line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def prepared_of(job: Job, folder: Path, positions: int | None = None) -> Prepared:
    """What the task of `job` prepares, with its cache in `folder`, for a model of `positions`."""
    return make_task(job).prepare(job, load_config(job.model.name, job.model.config), folder / "cache", 0, positions)


def job_of(kind: str, data: dict[str, Any], **task: Any) -> Job:
    """A job of the task `kind` with a tiny encoder."""
    tables = {"model": {"config": dict(TINY_BERT)}, "data": data, "task": {"kind": kind} | task}
    return make_job(Document("job.toml", tables)).job


def chat_job(source: str, **data: Any) -> Job:
    """A job of causal-lm with a tiny decoder, whose conversations are written by "chatml"."""
    model = {"config": {**TINY_LLAMA, "vocab_size": 400, "max_position_embeddings": 256}}
    tables = {"model": model, "data": {"train": source, "chat_template": "chatml", **data}, "task": {"kind": "causal-lm"}}
    return Job.model_validate(tables)


def prepare_rows(kind: str, folder: Path, rows: list[dict[str, Any]], data: dict[str, Any], **task: Any) -> Prepared:
    """What the task prepares of `rows`, or of the source in `data`."""
    return prepared_of(job_of(kind, {"train": write_jsonl(folder / "rows.jsonl", rows)} | data, **task), folder)
