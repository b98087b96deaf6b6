"""The time forecast: what its two ends count."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hwopt.config.profile import make_profile
from hwopt.config.toml import Document
from hwopt.memory.forecast.roofline import HOST_SECONDS, operation_peaks, operation_seconds
from hwopt.memory.trace.timeline import Timeline

CARD = {"match": ["a card"], "memory_gib": 16, "compute_capability": "7.5", "memory_bandwidth_gbps": 100}
PEAK = {"dense_tflops": {"fp16": 50, "fp32": 5}}


def operations(gigabytes: list[float], teraflops: list[float]) -> Timeline:
    """One fp16 operation per entry, each with its own tensor; none of them belongs to the update."""
    number = np.arange(len(gigabytes))
    return Timeline(
        events=number + 1,
        sizes=np.array(gigabytes) * 1e9,
        kinds=np.zeros(len(number), np.int64),
        operands=number,
        ends=number + 1,
        flops=np.array(teraflops) * 1e12,
        dtypes=np.array(["float16"] * len(number)),
        update=len(number),
        tf32=False,
        granularity=512,
        phases=np.array([0, 0, 0]),
    )


def seconds(timeline: Timeline, prepared_steps: tuple[Any, ...] = ()) -> tuple[float, float]:
    profile = make_profile(Document("a profile", {"name": "drawn", "card": CARD | PEAK}))
    plan: Any = SimpleNamespace(card=profile.card, recipe=SimpleNamespace(prepared_steps=prepared_steps))
    fast, slow = operation_seconds(plan, timeline, operation_peaks(plan, timeline), update=False)
    return float(fast), float(slow)


def test_each_operation_takes_the_longer_of_arithmetic_and_transfer() -> None:
    fast, slow = seconds(operations([10.0, 1.0], [1.0, 5.0]))
    assert fast == pytest.approx(10 / 100 + 5 / 50)
    assert slow == pytest.approx(10 / 100 / 0.5 + 5 / 50 / 0.3)


def test_fast_end_of_a_compiled_step_counts_only_arithmetic() -> None:
    """Fused kernels keep intermediate results in registers."""
    timeline = operations([10.0, 1.0], [1.0, 5.0])
    fast, slow = seconds(timeline, prepared_steps=(lambda run: None,))
    assert fast == pytest.approx(6 / 50)
    assert slow == seconds(timeline)[1]


def test_slow_end_is_at_least_the_time_to_start_the_operations() -> None:
    fast, slow = seconds(operations([0.0] * 1000, [0.0] * 1000))
    assert (fast, slow) == (0.0, pytest.approx(1000 * HOST_SECONDS))
