"""Any split of a step batch, on any number of ranks, gives the same gradients (docs/exactness.md)."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from training.float64 import tiny_run
from transformers import T5ForConditionalGeneration

from hwopt.data.batches.samplers import StepSampler
from hwopt.data.batches.step_batch import Step, StepBatch
from hwopt.training.run import Run

ROWS = 11
KINDS = ("text-classification", "causal-lm", "image-classification", "seq2seq-lm")
LIMITS = {"float32": 1e-6, "float64": 1e-12}
T5_LIMIT = 1e-12 if T5ForConditionalGeneration._supports_sdpa else 1e-6
"""T5's own attention in older versions of transformers computes its softmax in float32."""


def split_step(run: Run, groups: list[list[int]]) -> StepBatch:
    """The first step batch of the data of `run`, split into `groups`."""
    dataset = run.train_loader.dataset
    samples = tuple(range(sum(map(len, groups))))
    count = int(dataset.store.counts[list(samples)].sum())
    collate = dataset.collate.__class__(
        cut=lambda lengths, rows: groups, max_rows=ROWS, pad_id=dataset.collate.pad_id, mask=dataset.collate.mask
    )
    return type(dataset)(dataset.store, collate)[Step(0, 0, samples, count)]


def gradient(run: Run, batch: StepBatch) -> torch.Tensor:
    run.engine.zero_grad()
    for micro_batch, last in batch.micro_batches():
        loss, _ = run.loss(run.model(**micro_batch.inputs), micro_batch.targets)
        run.engine.backward(loss, micro_batch.loss_weight, last)
    return torch.cat([p.grad.flatten() for p in run.inner_model.parameters() if p.grad is not None])


@st.composite
def partitions(draw: st.DrawFn) -> list[list[int]]:
    """Rows 0 … ROWS - 1 in any order, split anywhere."""
    order = draw(st.permutations(range(ROWS)))
    cuts = sorted(draw(st.sets(st.integers(1, ROWS - 1))))
    return [list(order[a:b]) for a, b in zip([0, *cuts], [*cuts, ROWS], strict=True)]


@pytest.mark.parametrize("examples", [8, pytest.param(500, marks=pytest.mark.soak)])
@pytest.mark.parametrize(("kind", "dtype"), [("causal-lm", "float32"), *((kind, "float64") for kind in KINDS)])
def test_any_split_gives_the_same_gradient(kind: str, dtype: str, examples: int, tmp_path: Path) -> None:
    with tiny_run(tmp_path, kind, dtype=dtype) as run:
        whole = gradient(run, split_step(run, [list(range(ROWS))]))
        assert whole.norm() > 0

        @given(partitions())
        @settings(deadline=None, max_examples=examples)
        def check(groups: list[list[int]]) -> None:
            difference = (gradient(run, split_step(run, groups)) - whole).norm() / whole.norm()
            assert difference <= (T5_LIMIT if kind == "seq2seq-lm" else LIMITS[dtype]), groups

        check()


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_all_ranks_add_up_to_that_of_one_rank(kind: str, tmp_path: Path) -> None:
    """The gradients over each rank's samples, summed, equal the gradient of a single rank."""
    with tiny_run(tmp_path, kind) as run:
        dataset = run.train_loader.dataset
        for step in range(run.steps_per_epoch):  # the last step is partial
            parts = []
            for ranks in (1, 3):
                run.world_size = 1  # the weights count all ranks; this test sums the ranks itself
                total = torch.zeros(())
                for rank in range(ranks):
                    whole: StepSampler = run.train_loader.sampler
                    sampler = replace(whole, rank=rank, world_size=ranks, total_steps=run.steps_per_epoch)
                    total = total + gradient(run, dataset[list(sampler)[step]])
                parts.append(total)
            assert (parts[0] - parts[1]).norm() <= (T5_LIMIT if kind == "seq2seq-lm" else 1e-12) * parts[0].norm()


def test_partial_last_step_is_divided_by_its_own_count(tmp_path: Path) -> None:
    with tiny_run(tmp_path, "text-classification") as run:
        sampler = run.train_loader.sampler
        steps = list(sampler.__class__(**{**sampler.__dict__, "rows": 16, "total_steps": 3}))
        assert [len(step.samples) for step in steps] == [16, 16, 8]
        last = run.train_loader.dataset[steps[-1]]
        assert sum(micro_batch.loss_weight * micro_batch.count for micro_batch, _ in last.micro_batches()) == pytest.approx(1.0)
