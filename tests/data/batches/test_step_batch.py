import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hwopt.data.batches.collate import Collate, cut_in_order
from hwopt.data.batches.samplers import EvalSampler, StepSampler
from hwopt.data.batches.step_batch import Step, Widths
from hwopt.training.randomness import shuffled


def sampler(samples: int, rows: int, steps: int, rank: int = 0, world: int = 1, start: int = 0) -> StepSampler:
    counts = np.arange(1, samples + 1, dtype=np.int32)
    return StepSampler(counts, counts, shuffled, 0, rows, steps, rank, world, start)


@given(st.integers(1, 90), st.integers(1, 32), st.integers(1, 4), st.integers(1, 3))
def test_ranks_share_every_epoch_exactly(samples: int, rows: int, world: int, epochs: int) -> None:
    per_epoch = -(-samples // rows)
    steps = per_epoch * epochs
    ranks = [list(sampler(samples, rows, steps, rank, world)) for rank in range(world)]
    assert {len(of_rank) for of_rank in ranks} == {steps}
    seen: list[int] = []
    for together in zip(*ranks, strict=True):
        real = [i for step in together if not step.weightless for i in step.samples]
        assert len({step.count for step in together}) == 1
        assert together[0].count == sum(i + 1 for i in real), "the count is the whole step's, over all ranks"
        assert all(step.samples for step in together), "no rank goes without a micro-batch"
        seen += real
    assert sorted(seen) == sorted(list(range(samples)) * epochs)


@given(st.integers(1, 60), st.integers(1, 16), st.integers(1, 40), st.data())
def test_sampler_started_later_yields_the_same_remaining_steps(samples: int, rows: int, steps: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, steps))
    whole = list(sampler(samples, rows, steps))
    assert list(sampler(samples, rows, steps, start=start)) == whole[start:]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 200), st.integers(1, 3), st.sampled_from([1, 8]))
def test_evaluation_counts_every_sample_once_longest_first(lengths: list[int], tokens: int, world: int, multiple: int) -> None:
    array, width = np.array(lengths, np.int32), Widths(multiple=multiple).of
    samplers = [EvalSampler(array, array, lambda width: max(1, tokens // width), width, rank, world) for rank in range(world)]
    steps = [list(sampler) for sampler in samplers]
    assert {len(each) for each in steps} == {len(samplers[0])}, "ranks that meet in each batch would wait for each other"
    computed = [len(step.samples) * width(max(lengths[i] for i in step.samples)) for each in steps for step in each]
    assert max(computed) == computed[0] <= max(tokens, width(max(lengths))), "no batch is larger than the first"
    of_ranks = [[i for step in each if not step.weightless for i in step.samples] for each in steps]
    assert sorted(itertools.chain(*of_ranks)) == list(range(len(lengths)))
    assert all(array[a] >= array[b] for mine in of_ranks for a, b in itertools.pairwise(mine))


def make_samples(lengths: list[int], causal: bool) -> list[dict[str, np.ndarray]]:
    made = []
    for number, length in enumerate(lengths):
        ids = np.arange(1, length + 1, dtype=np.int32) + 100 * number
        labels = np.concatenate([ids[1:], [-100]]).astype(np.int32) if causal else np.array(number % 3)
        made.append({"input_ids": ids, "labels" if causal else "row_labels": labels})
    return made


def batch_of(lengths: list[int], rows: int, causal: bool = False, **options: Any) -> Any:
    step = Step(0, 0, tuple(range(len(lengths))), len(lengths))
    return Collate(cut_in_order, rows, pad_id=0, **options)(step, make_samples(lengths, causal), [1] * len(lengths))


def test_fixed_widths_and_multiples() -> None:
    batch = batch_of([3, 9, 17, 40], 1, widths=Widths((8, 16, 32)))
    assert [width for _, width in batch.sizes] == [8, 16, 32, 40]
    batch = batch_of([3, 9, 17], 1, widths=Widths(multiple=8))
    assert [width for _, width in batch.sizes] == [8, 16, 24]


def test_prebuilt_mask_has_four_dimensions() -> None:
    batch = batch_of([2, 4], 2, mask="prebuilt_mask")
    (micro_batch, last), *_ = batch.micro_batches()
    assert micro_batch.inputs["attention_mask"].shape == (2, 1, 1, 4)
    assert micro_batch.inputs["attention_mask"].dtype == torch.bool
    assert last


def test_decoders_get_no_mask() -> None:
    batch = batch_of([2, 4], 2, mask=None)
    assert all(set(m.inputs) == {"input_ids"} for m, _ in batch.micro_batches())


def test_weightless_rank_has_count_zero() -> None:
    step = Step(0, 0, (3,), 10, weightless=True)
    batch = Collate(cut_in_order, 4, pad_id=0)(step, make_samples([5], False), [1])
    assert [m.loss_weight for m, _ in batch.micro_batches()] == [0.0]
    assert batch.rows == batch.tokens == 0


def test_cut_that_loses_a_row_fails_an_assertion() -> None:
    with pytest.raises(AssertionError, match="every row once"):
        Collate(lambda lengths, rows: [[0]], 2, pad_id=0)(Step(0, 0, (0, 1), 2), make_samples([3, 4], False), [1, 1])


@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.integers(1, 20), st.integers(0, 6), st.booleans(), st.data())
def test_splits_of_any_rung_hold_every_row_as_it_was(
    lengths: list[int], rows: int, rung: int, causal: bool, data: st.DataObject
) -> None:
    batch = batch_of(lengths, rows, causal)
    samples = make_samples(lengths, causal)
    coarser = data.draw(st.integers(0, rung))  # at which the rows before `first` were done
    first = data.draw(st.sampled_from([0, *(m.end_row for m, _ in batch.micro_batches(coarser))]))
    row = first
    for micro_batch, last in batch.micro_batches(rung, first):
        ids = micro_batch.inputs["input_ids"]
        assert len(ids) <= -(-rows // 2**rung)
        assert ids.shape[1] <= max(lengths)
        mask = micro_batch.inputs.get("attention_mask")
        for number in range(len(ids)):
            length, width = lengths[row], ids.shape[1]
            assert ids[number].tolist() == [*samples[row]["input_ids"], *[0] * (width - length)]
            if mask is not None:
                assert mask[number].tolist() == [1] * length + [0] * (width - length)
            else:
                assert length == width, "no mask only without padding"
            if causal:
                assert micro_batch.targets[number].tolist() == [*samples[row]["labels"], *[-100] * (width - length)]
            else:
                assert micro_batch.targets[number] == row % 3
            row += 1
        assert micro_batch.end_row == row
        assert last == (row == len(lengths))
    assert row == len(lengths)
    assert batch.tokens == sum(lengths)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.integers(1, 20))
def test_finest_rung_is_the_first_one_with_single_rows(lengths: list[int], rows: int) -> None:
    batch = batch_of(lengths, rows)
    floor = batch.finest_rung
    assert all(len(m.targets) == 1 for m, _ in batch.micro_batches(floor))
    assert floor == 0 or any(len(m.targets) > 1 for m, _ in batch.micro_batches(floor - 1))
