"""Steps of `Task.prepare`: read the sources, write the token stores, and report what they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hwopt.config.job import Job
from hwopt.config.job_sources import paths_of
from hwopt.data.bad_rows import Places
from hwopt.data.mixture import Mixture
from hwopt.data.sources.reading import read_all, read_options
from hwopt.data.sources.rows import Rows
from hwopt.data.stores.chunks import Chunks, only_process
from hwopt.data.stores.images import ImageStore
from hwopt.data.stores.token_store import TokenStore, fingerprint
from hwopt.data.tokenizer import Encoding, choose_padding, used_ids
from hwopt.data.tokenizer_training import tokenizer_fingerprint
from hwopt.model.facts import is_decoder
from hwopt.tasks.prepared import Prepared, Samples, Trained

if TYPE_CHECKING:
    from hwopt.data.stores.token_store import Store

FORMAT = 12  # format of the token stores; a new number invalidates the cached ones

AnyStore = TypeVar("AnyStore", bound=TokenStore)


def read_sources(job: Job) -> dict[str, Rows]:
    """The rows of the job's parts that have a source of their own: train, and what `Data.held_out` names."""
    data = job.data
    options = read_options(data)
    found = {"train": read_all(data.train, data.split, options)}
    for part, (sources, split) in data.held_out.items():
        found[part] = read_all(sources, split, options)
    for part, split in (("eval", data.eval_split), ("test", data.test_split)):
        if split is not None and part not in found:
            found[part] = read_all(paths_of(data.train), split, options, f" [{split}]")
    return found


def token_store(
    kind: type[AnyStore],
    samples: Samples,
    trained: Trained,
    cache: Path,
    settings: list[Any],
    content: Iterable[Iterable[Any]],
    encode: Callable[[Chunks], Encoding],
) -> AnyStore:
    """The store of `samples`, from the cache or written now. `settings`, `content` and the tokenizer identify it.

    While it is written, its chunks are in a folder beside it, from which the next process continues if this one is killed.
    """
    import numpy as np

    tokenizer, limit = trained.tokenizer, trained.limit

    def written() -> tuple[dict[str, Any], dict[str, Any]]:
        arrays, meta = encode(Chunks(staged))
        lengths = arrays.pop("lengths")
        arrays["offsets"] = np.concatenate([[0], np.cumsum(lengths)])
        per_token = trained.facts.target != "sample"
        known = {"labels_per_token": per_token, "max_length": limit.max_length, "samples": len(lengths)}
        return arrays, {**known, **used_ids(arrays["input_ids"], tokenizer), **meta}

    key = fingerprint([FORMAT, *settings], tokenizer_fingerprint(tokenizer), *content)
    folder, staged = cache / "tokens" / key, cache / "tokens" / f".{key}.chunks"
    store = kind(folder)
    if not store.is_complete():
        with only_process(staged):
            store = kind.cached(folder, written)
    report_left_out(store, samples)
    if not store.has("documents"):  # the store may come from a run with another model
        places = samples.places
        if left_out := [sample for sample, _ in store.meta["left_out"]]:
            places = places.take(np.delete(np.arange(len(samples)), left_out).tolist())
        limit.check(np.diff(store.array("offsets")), places)
    return store


def report_left_out(store: TokenStore | ImageStore, samples: Samples) -> None:
    """Add the samples that were left out, now or when the store was written, to the bad rows."""
    bad_rows, places = samples.bad_rows, samples.places
    for sample, reason in store.meta["left_out"]:
        bad_rows.add(places.numbers[sample], reason)
    if store.meta["left_out"]:
        bad_rows.check_again()
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


def described(part: str) -> str:
    """A part of the data in a message: "evaluation" for "eval", "evaluation (hard)" for "eval_hard"."""
    kind, _, name = part.partition("_")
    return {"eval": "evaluation"}.get(kind, kind) + (f" ({name})" if name else "")


def pad_as_needed(trained: Trained, stores: Mapping[str, Store]) -> None:
    """Choose the padding token of the tokenizer, if the samples are tokens."""
    facts = trained.facts
    if facts.inputs == "tokens":
        # a decoder takes the rightmost token that is not padding as the last one of a labelled text
        last_token = facts.target != "next_token" and is_decoder(trained.config)
        used = {number for store in stores.values() for number in store.meta["special_ids"]} if last_token else set()
        choose_padding(trained.tokenizer, used)


def make_prepared(stores: Mapping[str, Store], trained: Trained, **fields: Any) -> Prepared:
    """The Prepared of the stores, with the padding token chosen, and notes about what was truncated."""
    pad_as_needed(trained, stores)
    prepared = Prepared.of(stores, trained.tokenizer, label_names=trained.label_names, **fields)
    if (mixture := prepared.train.mixture) is not None:
        mixture.check()
        prepared.notes.extend(mixture.notes())
        prepared.warnings.extend(mixture.warnings())
    for part, store in stores.items():
        meta, which = store.meta, "" if part == "train" else f" of the {described(part)} data"
        of = f"of {meta.get('samples', 0):,}"
        if cut := meta.get("cut"):
            prepared.notes.append(f"truncated {cut:,} {of} texts{which} to {meta['max_length']} tokens")
        if merged := meta.get("merged"):
            prepared.notes.append(
                f"in {merged:,} {of} samples{which} the last tokens of the prompt merge with the completion and are trained. "
                "A blank between them belongs to the completion, not to the end of the prompt; a line break may end the prompt"
            )
        if cut := meta.get("cut_targets"):
            most = meta["max_target_length"]
            prepared.notes.append(f"truncated {cut:,} {of} targets{which} to {most} tokens (data.max_target_length)")
    return prepared
