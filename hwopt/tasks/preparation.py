"""Steps of `Task.prepare` that tasks share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwopt.config.job import Job
from hwopt.config.job_sources import Sources as SourcesOf
from hwopt.config.job_sources import paths_of
from hwopt.data.bad_rows import BadRows, Places
from hwopt.data.mixture import Mixture
from hwopt.data.sources.reading import read_all, read_options, refuse_missing
from hwopt.data.sources.rows import Rows
from hwopt.data.stores.image_store import ImageStore
from hwopt.data.stores.token_store import TokenStore
from hwopt.data.tokenizer import choose_padding, load_tokenizer
from hwopt.data.tokenizer_training import trained_tokenizer
from hwopt.tasks.prepared import Prepared

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class Sources:
    """The rows of a job's data; None for a part without a source of its own."""

    train: Rows
    eval: Rows | None
    test: Rows | None


def read_sources(job: Job) -> Sources:
    """Read the data of `job`."""
    data = job.data
    refuse_missing(data)
    options = read_options(data)

    def held_out(sources: SourcesOf | None, split: str | None) -> Rows | None:
        if sources is not None:
            return read_all(sources, split, options)
        return None if split is None else read_all(paths_of(data.train), split, options, f" [{split}]")

    train = read_all(data.train, data.split, options)
    return Sources(train, held_out(data.eval, data.eval_split), held_out(data.test, data.test_split))


def add_tokenless_rows(store: TokenStore | ImageStore, places: Places, bad_rows: BadRows) -> None:
    """Add the samples at `places` that were left out, now or when the store was written, to `bad_rows`."""
    for sample, reason in store.meta["left_out"]:
        bad_rows.add(places.numbers[sample], reason)
    if store.meta["left_out"]:
        bad_rows.check([number for number in places.numbers if number not in bad_rows.reasons])
    store.mixture = mixture_of(store, places)


def mixture_of(store: TokenStore | ImageStore, places: Places) -> Mixture | None:
    """The sources of the samples of `store`, which were made from the rows at `places`; None if the data is not a mixture.

    A block of plain text belongs to the source of its first document.
    """
    import numpy as np

    mixture = places.mixture()
    if mixture is None:
        return None
    if store.has("documents"):
        return mixture.take(store.array("documents"))
    return mixture.take(np.delete(np.arange(len(places.numbers)), [sample for sample, _ in store.meta["left_out"]]))


def tokenizer_for(job: Job, config: PretrainedConfig, texts: list[str], decoder: bool, cache: Path) -> Any:
    """The job's tokenizer, else the model's own, else one trained on `texts`."""
    if job.model.tokenizer is not None:
        return load_tokenizer(job.model.tokenizer)
    if job.model.name is not None:
        return load_tokenizer(job.model.name, job.model.revision, key="model.name")
    return trained_tokenizer(texts, job, config, decoder, cache)


def make_prepared(
    stores: Sequence[TokenStore | None], tokenizer: Any, names: tuple[str, ...] | None, avoid_used: bool
) -> Prepared:
    """The Prepared of the stores (training, evaluation, test), with the padding token chosen.

    `avoid_used`: no text may contain the padding token.
    """
    train, held_out, test = stores
    assert train is not None
    prepared = Prepared(train, held_out, tokenizer, names, test=test)
    used = {number for store in prepared.stores for number in store.meta["special_ids"]} if avoid_used else set()
    choose_padding(tokenizer, used)
    report_mixture(prepared)
    for store, which in ((train, ""), (held_out, " of the evaluation data"), (test, " of the test data")):
        if store is not None and (cut := store.meta["cut"]):
            prepared.notes.append(
                f"truncated {cut:,} of {store.meta['samples']:,} texts{which} to {store.meta['max_length']} tokens"
            )
    return prepared


def report_mixture(prepared: Prepared) -> None:
    """Check the mixture of the training data, and add its notes and warnings, if there is one."""
    if (mixture := prepared.train.mixture) is not None:
        mixture.check()
        prepared.notes.extend(mixture.notes())
        prepared.warnings.extend(mixture.warnings())
