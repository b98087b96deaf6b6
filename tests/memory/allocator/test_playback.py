"""A step is played on the caching allocator until it repeats."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hwopt.memory.allocator.caching_allocator import CachingAllocator
from hwopt.memory.allocator.gradients import late_casts
from hwopt.memory.allocator.playback import PlayedRun, PlayedSteps, Player, largest_played, played_run, played_step
from hwopt.memory.trace.timeline import KINDS, Timeline

MIB = 1 << 20


def timeline(sizes_mib: list[float], events: list[int], before: int = 0, **options: Any) -> Timeline:
    """A timeline of activations. `events`: number + 1 allocates, -(number + 1) releases, after `before` that exist."""
    return Timeline(
        events=np.array([*range(1, before + 1), *events]),
        sizes=np.array(sizes_mib) * MIB,
        kinds=np.full(len(sizes_mib), KINDS.index("activations")),
        operands=np.zeros(0, np.int64),
        ends=np.zeros(0, np.int64),
        flops=np.zeros(0),
        dtypes=np.zeros(0, np.str_),
        update=0,
        tf32=False,
        granularity=512,
        phases=np.array([0, 0, 0]),
        before=before,
        **({"cached": True} | options),
    )


def played(step: Timeline) -> PlayedRun:
    """A run whose evaluation is the same step."""
    return played_run([step], [step])


def test_block_that_is_not_split_counts_as_a_whole() -> None:
    """The second tensor takes the free block of the first, in which less than 1 MiB remains."""
    found = played(timeline([40, 39.5], [1, -1, 2, -2, 1]))
    assert found.train.bytes == 40 * MIB
    assert played(timeline([100, 40, 39.5], [2, -2, 3], before=1)).train.bytes == 140 * MIB
    assert found.train.parts["activations"] == 40 * MIB


def test_reserved_memory_includes_free_segments_that_are_too_small() -> None:
    found = played(timeline([20, 30, 40], [1, -1, 2, -2, 3, -3]))
    assert (found.train.bytes, found.reserved) == (40 * MIB, 90 * MIB)
    grown = played(timeline([20, 30, 40], [1, -1, 2, -2, 3, -3], expandable=True))
    assert (grown.train.bytes, grown.reserved) == (40 * MIB, 40 * MIB)


def test_tensors_of_the_step_before_are_replaced() -> None:
    """The step frees what the last one left, and leaves as much: two of 50 MiB exist at the same time."""
    found = played(timeline([100, 50, 50], [3, -2], before=2))
    assert (found.train.bytes, found.reserved) == (200 * MIB, 200 * MIB)


def test_first_micro_batch_makes_its_gradients_between_its_activations() -> None:
    """Weights of 100 MiB, gradients of 30, activations of 200. It splits their block, and the next ones need another."""
    kinds = np.array([KINDS.index(kind) for kind in ("weights", "gradients", "activations", "temporary")])
    step = replace(timeline([100, 30, 200, 30], [2, 3, -3, 4, -4, -2], before=1), kinds=kinds, phases=np.array([3, 6, 2]))
    step = replace(step, operands=np.array([1, 3]), ends=np.array([2]), update=1)
    evaluation = timeline([100], [], before=1)
    assert played_run([step, step], [evaluation]).reserved == (100 + 200 + 200) * MIB
    one_pass = replace(step, events=np.delete(step.events, 1), phases=np.array([2, 5, 1]))  # without earlier gradients
    assert played_run([one_pass, one_pass], [evaluation]).reserved == (100 + 200) * MIB
    fused = replace(step, phases=np.array([3, 6, 1]))  # the loss makes the gradient in the forward pass
    assert played_run([fused], [evaluation]).train.bytes == (100 + 30 + 200) * MIB


def test_gradient_of_a_fused_loss_is_not_a_shared_copy_of_a_weight() -> None:
    """It is made in the forward pass. With tied embeddings it lives until both passes have ended."""
    kinds = np.array([KINDS.index(kind) for kind in ("weights", "gradients", "activations", "temporary")])
    step = replace(timeline([100, 30, 200, 30], [2, 4, 3, -3, -4, -2], before=1), kinds=kinds, phases=np.array([4, 6, 2]))
    step = replace(step, operands=np.array([1, 3]), ends=np.array([2]), update=1)
    found = played_run([step, step], [timeline([100], [], before=1)])
    assert (found.train.bytes, found.reserved) == ((100 + 30 + 30 + 200) * MIB,) * 2


def test_micro_batches_of_a_step_share_copies_of_weights() -> None:
    """Weights of 100 MiB, gradients of 30, a copy of 50 that lives until both passes have ended, activations of 200 or 120."""
    kinds = np.array([KINDS.index(kind) for kind in ("weights", "gradients", "activations", "activations", "temporary")])
    events = [2, 3, 4, -4, 5, -5, -3, -2]
    step = replace(timeline([100, 30, 50, 200, 30], events, before=1), kinds=kinds, phases=np.array([4, 8, 2]))
    step = replace(step, operands=np.array([1, 4]), ends=np.array([2]), update=1)
    small, evaluation = replace(step, sizes=step.sizes * [1, 1, 1, 0.6, 1]), timeline([100], [], before=1)
    allocator = CachingAllocator()
    player = Player(evaluation, allocator)
    player.micro_batch()
    found = []
    for number, micro_batch in enumerate([small, step, small]):
        player = Player(micro_batch, allocator, player)
        found.append(player.micro_batch("exists", first=number == 0, last=number == 2).bytes // MIB)
    assert found == [100 + 50 + 120, 100 + 30 + 50 + 200, 100 + 30 + 50 + 120]
    assert allocator.allocated == 100 * MIB
    assert allocator.reserved == (100 + 50 + 120 + 200) * MIB, "the gradients of the first are in the block of its activations"
    alone = played_run([small], [evaluation], steps=[[step]])
    assert (alone.train.bytes, alone.train.parts["gradients"]) == (350 * MIB, 0), "a step of one micro-batch adds to no gradients"


def test_later_micro_batches_cast_gradients_at_the_end_of_the_backward_pass() -> None:
    """Weights of 100 MiB, two gradients of 30, a copy of 15, activations of 200; gradients of 15 are cast to 30.

    The first of the two weights is used elsewhere too: what it gets there, another 30, waits for the cast.
    """
    events = [2, 3, 4, 5, 6, 7, -6, 8, 9, -8, -9, -5, 10, -10, -7, -4, -3, -2]
    kinds = np.array([KINDS.index(kind) for kind in ("weights", "gradients", "gradients", *["activations"] * 7)])
    step = timeline([100, 30, 30, 15, 200, 15, 30, 15, 30, 30], events, before=1)
    step = replace(step, kinds=kinds, phases=np.array([5, 17, 3]))
    operands = [(5, 6), (7, 8), (2, 8), (6, 9), (1, 6)]  # cast, cast, add, add, add
    step = replace(step, operands=np.array(operands).ravel(), ends=np.arange(2, 11, 2), update=5)
    assert late_casts(step, {1, 2}, {6, 8}, {3}) == [7, -6, -7, -10, 9, -8, -9]
    _, peak = played_step(Player(timeline([100], [], before=1), CachingAllocator()), [step])
    assert peak.bytes == (100 + 16 + 200 + 30 + 16 + 30) * MIB, "blocks of 16 MiB"
    player, peak = played_step(Player(timeline([100], [], before=1), CachingAllocator()), [step, step])
    assert peak.bytes == (100 + 60 + 16 + 200 + 16 + 16) * MIB
    assert player.allocator.allocated == 100 * MIB
    others = replace(step, sizes=step.sizes * [1, 1, 1, 1, 1, 2, 1, 2, 1, 1])
    assert late_casts(others, {1, 2}, {6, 8}, {3}) == [], "gradients that were in fp32 before"
    assert late_casts(step, {1, 2}, {6, 8}, {}) == [], "with checkpointing the weights are cast again"


def test_cpu_reserves_nothing() -> None:
    found = played(timeline([20, 30], [1, -1, 2, -2], cached=False))
    assert found.train.bytes == found.reserved == 30 * MIB


def test_training_reuses_what_the_evaluation_reserved() -> None:
    train, evaluation = timeline([100, 40], [2, -2], before=1), timeline([100, 60], [2, -2], before=1)
    run = played_run([train], [evaluation])
    assert (run.train.bytes, run.eval.bytes, run.reserved) == (140 * MIB, 160 * MIB, 160 * MIB)
    smaller = timeline([100, 30], [2, -2], before=1)
    assert played_run([train], [smaller]).reserved == 170 * MIB, "its segments are too small"


@pytest.mark.parametrize("late", [False, True])
def test_state_that_the_first_update_creates_splits_a_block_of_the_evaluation(late: bool) -> None:
    """Weights of 100 MiB, a state of 20, an evaluation of 300; a step of 40 whose update takes 10."""
    kinds = np.array([KINDS.index(kind) for kind in ("weights", "optimizer_state", "activations", "temporary")])
    evaluation = replace(timeline([100, 20, 300, 0], [3, -3], before=2), kinds=kinds)
    train = replace(timeline([100, 20, 40, 10], [3, -3, 4, -4], before=2), kinds=kinds, late_state=late)
    train = replace(train, phases=np.array([3, 4, 2]))
    run = played_run([train], [evaluation])
    assert run.reserved == (720 - 20 if late else 420) * MIB
    assert played_run([train], [evaluation], steps=[[train]]) == run
    assert (run.train.bytes, run.eval.bytes) == (160 * MIB, 420 * MIB)


def test_largest_step_cannot_use_the_segments_of_a_smaller_one_before_it() -> None:
    small, evaluation, large = (timeline([100, size], [2, -2], before=1) for size in (50, 20, 80))
    assert played_run([large], [evaluation]).reserved == 200 * MIB
    assert played_run([large], [evaluation], steps=[[small]]).reserved == 250 * MIB


def test_captured_passes_keep_a_pool_beside_what_evaluation_reserves() -> None:
    """100 MiB of weights, 60 of the evaluation and 20 of the update in the common pool; 40 of the passes in their own."""
    evaluation = timeline([100, 60], [2, -2], before=1)
    step = replace(timeline([100, 40, 20], [2, -2, 3, -3], before=1), phases=np.array([1, 3, 1]))
    assert played_run([step], [evaluation]).reserved == 160 * MIB
    assert played_run([step], [evaluation], step).reserved == 200 * MIB
    larger = replace(step, sizes=step.sizes * [1, 3, 1])
    assert played_run([larger], [evaluation], step).reserved == played_run([larger], [evaluation]).reserved + 40 * MIB


@pytest.mark.parametrize("seed", range(20))
def test_peak_of_a_run_is_not_below_that_of_any_of_its_steps(seed: int) -> None:
    """Steps of the same operations and of other sizes, in any order."""
    random = np.random.default_rng(seed)
    events = [2, 3, -2, 4, -3, -4]
    steps = [[timeline([100, *random.uniform(1, 90, 3)], events, before=1) for _ in range(1 + seed % 2)] for _ in range(5)]
    evaluations = [timeline([100, *random.uniform(1, 90, 3)], events, before=1) for _ in range(3)]
    run = played_run(steps[0], evaluations, steps=steps[1:])
    assert run.train.bytes >= max(micro_batch.peak().bytes for step in steps for micro_batch in step)
    assert run.eval.bytes >= max(batch.peak().bytes for batch in evaluations)
    assert run.reserved >= max(run.train.bytes, run.eval.bytes)
    assert sum(run.train.parts.values()) == run.train.bytes


@pytest.mark.parametrize("budget_mib", [150, 400, 1000])
def test_largest_size_fits_and_a_larger_one_does_not(budget_mib: int) -> None:
    evaluation = timeline([100, 1], [2, -2], before=1)

    def at(rows: int) -> PlayedSteps:
        return [timeline([100, 3.1 * rows, 3.2 * rows], [2, -2, 3, -3], before=1)], [evaluation], None, ()

    most = largest_played(at, budget_mib * MIB)
    assert played_run(*at(most)).reserved <= budget_mib * MIB
    more = most + max(1, most // 100)
    assert played_run(*at(more)).reserved > budget_mib * MIB
