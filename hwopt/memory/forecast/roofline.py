"""Roofline: predicts the time of a step on the profile's card from the card's facts and the traced operations. Not measured.

Each operation takes the longer of its arithmetic at the card's peak and its bytes at the card's bandwidth. The fast end of the
range assumes 100 % of both. If the recipe changes the model after `accelerator.prepare` (it may compile it), fused kernels need
not move the bytes of single operations: then the fast end counts only the arithmetic. The slow end assumes what ordinary kernels
reach on a card that runs at its base clock, and at least the time in which the host starts them.
Source: Williams et al. 2009, "Roofline"; peak and bandwidth are in the profile's [card]. docs/memory.md compares published
steps with it.
"""

from __future__ import annotations

from math import ceil

import numpy as np
from numpy.typing import NDArray

from hwopt.config.card import Card
from hwopt.memory.shapes import Shape, micro_batch_shapes
from hwopt.memory.trace.timeline import Scaled, Timeline
from hwopt.planning.memory_plan import Prediction
from hwopt.planning.plan import Plan

SLOW_COMPUTE = 0.3
"""Fraction of the peak. A T4 at its base clock (585 of 1,590 MHz, NVIDIA's data sheet) has 0.37 of it; large products reach 0.8
of that."""
SLOW_MEMORY = 0.5
"""Fraction of the bandwidth that kernels with strided or small tensors reach."""
HOST_SECONDS = 25e-6
"""Time to start one operation from Python on a slow core: 26 to 31 ms for a step of BERT-base with 1,042 kernel launches."""
SAMPLED_STEPS = 16
"""Step batches over which the mean is taken."""


def predict_time(plan: Plan, train: Scaled, lengths: NDArray[np.int32] | None, width: int) -> Prediction | None:
    """Return the predicted times; None for a CPU and for a card whose peaks the profile does not state.

    `width`: tokens of a sample, if `lengths` are not known.
    """
    if not card_peaks(plan.card) or plan.card is None or plan.card.memory_bandwidth_gbps is None:
        return None
    steps = sampled_steps(plan, lengths, width)
    peaks = operation_peaks(plan, train.base)
    cost: dict[Shape, NDArray[np.float64]] = {}
    seconds = np.zeros(2)
    for step in steps:
        for shape in step:
            if shape not in cost:
                cost[shape] = operation_seconds(plan, train.at(*shape), peaks, update=False)
            seconds += cost[shape]
        seconds += operation_seconds(plan, train.base, peaks, update=True)
    seconds /= len(steps)
    low, high = float(seconds[0]), float(seconds[1])
    if lengths is None:
        return Prediction((low, high), None, None, rows=plan.batch.step)
    per_epoch = ceil(len(lengths) / plan.batch.step)
    total = plan.training.max_steps or ceil(plan.training.num_train_epochs * per_epoch)
    epoch, whole = (low * per_epoch, high * per_epoch), (low * total, high * total)
    return Prediction((low, high), epoch, whole, rows=plan.batch.step)


def card_peaks(card: Card | None) -> dict[str, float]:
    """Return the dense TFLOP/s by precision that the profile states for the card."""
    return {} if card is None else {name: peak for name, peak in card.dense_tflops.model_dump().items() if peak}


def sampled_steps(plan: Plan, lengths: NDArray[np.int32] | None, width: int) -> list[list[Shape]]:
    """Return the shapes of the micro-batches of some step batches of one rank.

    The samples are random ones of the data, or without data all of `width` tokens.
    """
    share = ceil(plan.batch.step / plan.world_size)
    random = np.random.Generator(np.random.Philox(0))
    drawn = [[width] * share] if lengths is None else random.choice(lengths, (SAMPLED_STEPS, share)).tolist()
    return [micro_batch_shapes(plan, chosen, plan.batch.train) for chosen in drawn]


def operation_peaks(plan: Plan, timeline: Timeline) -> NDArray[np.float64]:
    """Return the card's FLOP/s for each operation, by its dtype."""
    peaks = card_peaks(plan.card)
    slowest = min(peaks.values())
    names = {"float16": "fp16", "bfloat16": "bf16", "float32": "tf32" if timeline.tf32 else "fp32"}
    return np.array([peaks.get(names.get(str(dtype), "fp32"), slowest) for dtype in timeline.dtypes]) * 1e12


def operation_seconds(plan: Plan, timeline: Timeline, peaks: NDArray[np.float64], update: bool) -> NDArray[np.float64]:
    """Return (fast, slow) seconds of a micro-batch's forward and backward, or of the update. `peaks`: `operation_peaks`."""
    part = slice(timeline.update, None) if update else slice(0, timeline.update)
    flops, moved, peak = timeline.flops[part], timeline.bytes_moved()[part], peaks[part]
    assert plan.card is not None, "times are predicted for a known card"
    bandwidth = (plan.card.memory_bandwidth_gbps or 1.0) * 1e9
    fused = bool(plan.recipe.prepared_steps) and not update
    fast = (flops / peak if fused else np.maximum(flops / peak, moved / bandwidth)).sum() if len(flops) else 0.0
    slow = np.maximum(flops / peak / SLOW_COMPUTE, moved / bandwidth / SLOW_MEMORY).sum() if len(flops) else 0.0
    return np.array([fast, max(slow, len(flops) * HOST_SECONDS)])
