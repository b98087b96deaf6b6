"""Steps of `Task.prepare` that tasks share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwopt.config.job import Job
from hwopt.data.bad_rows import BadRows, Places
from hwopt.data.rows import ReadOptions, Rows
from hwopt.data.tables import read_rows
from hwopt.data.token_store import TokenStore
from hwopt.data.tokenizer import choose_padding, load_tokenizer
from hwopt.data.tokenizer_training import trained_tokenizer
from hwopt.tasks.base import Prepared

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def read_sources(job: Job) -> tuple[Rows, Rows | None]:
    """(rows for training, rows for evaluation); None if the job has no evaluation source."""
    data = job.data
    options = ReadOptions(data.on_bad_row == "stop", data.max_bad_rows, data.encoding, data.delimiter)
    train = read_rows(data.train, data.split, options)
    if data.eval is not None:
        return train, read_rows(data.eval, data.eval_split, options)
    if data.eval_split is not None:
        return train, read_rows(data.train, data.eval_split, options, f"{data.train} [{data.eval_split}]")
    return train, None


def add_tokenless_rows(store: TokenStore, places: Places, bad_rows: BadRows) -> None:
    """Add the samples at `places` that tokenising skipped, now or when the store was written, to `bad_rows`."""
    for sample, reason in store.meta["left_out"]:
        bad_rows.add(places.numbers[sample], reason)
    if store.meta["left_out"]:
        bad_rows.check([number for number in places.numbers if number not in bad_rows.reasons])


def tokenizer_for(job: Job, config: PretrainedConfig, texts: list[str], decoder: bool, cache: Path) -> Any:
    """The job's tokenizer, else the model's own, else one trained on `texts`."""
    if job.model.tokenizer is not None:
        return load_tokenizer(job.model.tokenizer)
    if job.model.name is not None:
        return load_tokenizer(job.model.name, job.model.revision, key="model.name")
    return trained_tokenizer(texts, job, config, decoder, cache)


def make_prepared(
    train: TokenStore, held_out: TokenStore | None, tokenizer: Any, names: tuple[str, ...] | None, avoid_used: bool
) -> Prepared:
    """The Prepared of two stores, with the padding token chosen. `avoid_used`: no text may contain the padding token."""
    stores = [(train, "")] if held_out is None else [(train, ""), (held_out, " of the evaluation data")]
    used = {number for store, _ in stores for number in store.meta["special_ids"]} if avoid_used else set()
    choose_padding(tokenizer, used)
    notes = [
        f"truncated {store.meta['cut']:,} of {store.meta['samples']:,} texts{which} to {store.meta['max_length']} tokens"
        for store, which in stores
        if store.meta["cut"]
    ]
    return Prepared(train, held_out, tokenizer, names, notes)
