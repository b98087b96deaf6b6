"""Mixtures: each epoch draws from each source in proportion to its weight, as a function of seed and epoch."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from task_rows import prepared_of

from hwopt import api
from hwopt.config.job import Job
from hwopt.data.mixture import Mixture
from hwopt.errors import DataError, InputError
from hwopt.testing import TINY_BERT, TINY_LLAMA, plan_for, rewound, saved_bits, tiny_job, tiny_profile, train_tiny, write_samples


def mixture(sizes: Sequence[int], weights: Sequence[float]) -> Mixture:
    names = tuple(f"source {number}" for number in range(len(sizes)))
    return Mixture(names, tuple(weights), np.repeat(np.arange(len(sizes)), sizes))


sources = st.lists(st.tuples(st.integers(1, 40), st.floats(1e-3, 1e3)), min_size=2, max_size=5)


@given(sources)
def test_quotas_are_the_shares_of_the_weights_to_one_sample(parts: list[tuple[int, float]]) -> None:
    sizes, weights = zip(*parts, strict=True)
    quotas = mixture(sizes, weights).quotas
    assert quotas.sum() == sum(sizes)
    assert (np.abs(quotas - sum(sizes) * np.array(weights) / sum(weights)) < 1 + 1e-9).all()


@given(sources, st.integers(0, 2**63 - 1), st.integers(1, 6))
def test_epochs_draw_the_quotas_and_use_the_samples_of_a_source_equally_often(
    parts: list[tuple[int, float]], seed: int, epochs: int
) -> None:
    mixed = mixture(*zip(*parts, strict=True))
    drawn = [mixed.drawn(seed, epoch) for epoch in range(epochs)]
    for epoch in drawn:
        assert (np.bincount(mixed.source_of[epoch], minlength=len(parts)) == mixed.quotas).all()
    uses = np.bincount(np.concatenate(drawn), minlength=len(mixed.source_of))
    for source in range(len(parts)):
        own = uses[mixed.source_of == source]
        assert own.max() - own.min() <= 1


def mixed_sources(folder: Path, sizes: tuple[int, int] = (30, 10), weights: tuple[float, float] = (1, 1)) -> list[dict[str, Any]]:
    found = []
    for number, (size, weight) in enumerate(zip(sizes, weights, strict=True)):
        path = write_samples(folder / f"source-{number}.jsonl", size, seed=10 + number)
        found.append({"path": str(path), "weight": weight})
    return found


def test_resumed_run_of_a_mixture_ends_with_the_same_bits(tmp_path: Path) -> None:
    data = {"train": mixed_sources(tmp_path)}
    plan = plan_for(tiny_profile(), tiny_job(tmp_path, data=data, max_steps=12, save_steps=1, save_total_limit=0))
    whole = train_tiny(plan, tmp_path).run
    assert [row["samples_per_epoch"] for row in whole.prepared.train.mixture.rows()] == [20, 20]
    resumed = rewound(tmp_path / "run", tmp_path / "resumed", 7)
    api.execute(plan, resumed, resume=True, cache=tmp_path / "cache")
    assert saved_bits(resumed / "checkpoint-12") == saved_bits(tmp_path / "run" / "checkpoint-12")
    summary = json.loads((resumed / "summary.json").read_text())
    rows = [(Path(row["source"]).name, row["weight"], row["samples"], row["samples_per_epoch"]) for row in summary["mixture"]]
    assert rows == [("source-0.jsonl", 1.0, 30, 20), ("source-1.jsonl", 1.0, 10, 20)]
    data["train"][0]["weight"] = 3
    other = plan_for(tiny_profile(), tiny_job(tmp_path, data=data, max_steps=12))
    with pytest.raises(InputError, match=r"mixture was 30 samples with weight 1, 10 .* is now 30 samples with weight 3"):
        api.execute(other, rewound(tmp_path / "run", tmp_path / "other", 7), resume=True, cache=tmp_path / "cache")


def prepare(folder: Path, kind: str, train: Any, **data: Any) -> Any:
    config = TINY_BERT if kind == "text-classification" else TINY_LLAMA
    job = Job.model_validate({"model": {"config": config}, "task": {"kind": kind}, "data": {"train": train, **data}})
    return prepared_of(job, folder)


def test_skipped_rows_and_held_out_rows_belong_to_no_draw(tmp_path: Path) -> None:
    train = mixed_sources(tmp_path, (100, 60), (1, 3))
    path = Path(train[0]["path"])
    path.write_text(path.read_text() + '{"text": "", "label": "other"}\nnot JSON\n')
    prepared = prepare(tmp_path, "text-classification", train, eval_fraction=0.25)
    mixed = prepared.train.mixture
    assert len(mixed.source_of) == len(prepared.train) == 120
    assert mixed.sizes.sum() == 120
    assert mixed.quotas.tolist() == [30, 90]
    notes = [note for note in prepared.notes if note.startswith("mixture: 75.0% of an epoch is ")]
    assert len(notes) == 1
    assert re.search(rf": 90 samples drawn from {mixed.sizes[1]} \({90 / mixed.sizes[1]:.3g} passes\)", notes[0])


def test_blocks_of_text_belong_to_the_source_of_their_first_document(tmp_path: Path) -> None:
    for name, words in (("a", "alpha beta "), ("b", "gamma delta ")):
        (tmp_path / name).mkdir()
        for number in range(4):
            (tmp_path / name / f"{number}.txt").write_text(words * 40)
    train = [{"path": str(tmp_path / name / "*.txt"), "weight": weight} for name, weight in (("a", 1), ("b", 2))]
    prepared = prepare(tmp_path, "causal-lm", train, max_length=16)
    store, mixed = prepared.train, prepared.train.mixture
    texts = [prepared.tokenizer.decode(store.row(sample)["input_ids"]) for sample in range(len(store))]
    starts = [0 if text.replace("<|endoftext|>", "").split()[0] in ("alpha", "beta") else 1 for text in texts]
    assert mixed.source_of.tolist() == starts
    assert set(starts) == {0, 1}


@pytest.mark.parametrize(
    ("sizes", "weights", "message"),
    [
        ((30, 10), (1e6, 1), r"source-1\.jsonl: with its weight an epoch of 40 samples draws none from it; raise the weight"),
        ((3, 1), (1, 1), r"source-1\.jsonl: has no sample to train on; lower data\.eval_fraction"),
    ],
)
def test_source_without_a_draw_is_refused(
    tmp_path: Path, sizes: tuple[int, int], weights: tuple[float, float], message: str
) -> None:
    fraction = {"eval_fraction": 0.25} if sum(sizes) == 4 else {}
    train = mixed_sources(tmp_path, sizes, weights)
    with pytest.raises(DataError, match=message):
        prepare(tmp_path, "text-classification", train, **fraction)


def test_source_that_an_epoch_repeats_often_has_a_warning(tmp_path: Path) -> None:
    prepared = prepare(tmp_path, "text-classification", mixed_sources(tmp_path, (90, 10), (1, 1)))
    (warning,) = prepared.warnings
    assert warning.startswith("each epoch repeats the samples of ")
    assert warning.endswith(" 5 times; its weight may be too high")
