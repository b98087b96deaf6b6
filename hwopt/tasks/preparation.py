"""Steps that tasks share to turn a job's files into token stores."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwopt.config.job import Job
from hwopt.data.bad_rows import BadRows, Places
from hwopt.data.rows import Rows
from hwopt.data.tables import read_rows
from hwopt.data.token_store import TokenStore
from hwopt.data.tokenizer import Limit, choose_padding, load_tokenizer
from hwopt.data.tokenizer_training import trained_tokenizer

if TYPE_CHECKING:
    from transformers import PretrainedConfig
from hwopt.tasks.base import Prepared


def read_sources(job: Job) -> tuple[Rows, Rows | None]:
    """The rows to train on and to evaluate on; None where the job gives none or only a fraction."""
    strict = job.data.on_bad_row == "stop"
    train = read_rows(job.data.train, job.data.split, strict)
    if job.data.eval is not None:
        return train, read_rows(job.data.eval, job.data.eval_split, strict)
    if job.data.eval_split is not None:
        return train, read_rows(job.data.train, job.data.eval_split, strict, f"{job.data.train} [{job.data.eval_split}]")
    return train, None


def add_tokenless_rows(store: TokenStore, places: Places, left_out: BadRows) -> None:
    """What tokenising, now or when the store was made, has left out of the samples at `places`."""
    for sample, why in store.meta["left_out"]:
        left_out.add(places.numbers[sample], why)
    if store.meta["left_out"]:
        left_out.check([number for number in places.numbers if number not in left_out.whys])


def tokenizer_for(job: Job, config: PretrainedConfig, texts: list[str], decoder: bool, cache: Path) -> Any:
    """The job's tokenizer, else the model's own, else one trained on `texts`."""
    if job.model.tokenizer is not None:
        return load_tokenizer(job.model.tokenizer)
    if job.model.name is not None:
        return load_tokenizer(job.model.name, job.model.revision, key="model.name")
    return trained_tokenizer(texts, job, config, decoder, cache)


def finish(
    train: TokenStore, held_out: TokenStore | None, tokenizer: Any, names: tuple[str, ...] | None, avoid_used: bool
) -> Prepared:
    """Choose the padding token, and say what was cut. `avoid_used`: no text may contain the padding token."""
    stores = [(train, "")] if held_out is None else [(train, ""), (held_out, " of the evaluation")]
    used = {number for store, _ in stores for number in store.meta["special_ids"]} if avoid_used else set()
    choose_padding(tokenizer, used)
    notes = [
        f"{store.meta['cut']:,} of {store.meta['samples']:,} texts{which} are longer than {store.meta['max_length']} tokens "
        "and are cut"
        for store, which in stores
        if store.meta["cut"]
    ]
    return Prepared(train, held_out, tokenizer, names, notes)


def limit_of(job: Job, max_positions: int | None) -> Limit:
    """Raises InputError where the job's max_length is more than the model takes."""
    return Limit(job.data.max_length, max_positions)
