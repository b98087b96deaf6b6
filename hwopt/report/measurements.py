"""How well a run used its device ("use" in summary.json), as tables: the parts of a step, and the means of what was sampled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hwopt.report.sheet import is_number, with_unit

PARTS = {
    "data_wait_share": "waiting for data",
    "forward_share": "forward",
    "backward_share": "backward",
    "update_share": "update of the weights",
}
"""What the time of training is spent on -> its name. The last three are shares of the steps that were timed."""
STEP = {
    "data_wait_share": "waiting for data, of the training",
    "forward_share": "forward, of a timed step",
    "backward_share": "backward, of a timed step",
    "update_share": "update of the weights, of a timed step",
    "host_ms_per_micro_batch": "host time per micro-batch",
    "device_ms_per_micro_batch": "device time per micro-batch",
    "device_waits_share": "timed steps in which the device waited for the host",
}
NAMES = {
    "gpu_percent": "GPU use, mean",
    "memory_busy_percent": "memory of the GPU busy, mean",
    "memory_gib": "memory in use on the GPU, by all processes, mean",
    "power_watts": "power, mean",
    "temperature_celsius": "temperature, mean",
    "clock_mhz": "clock, mean",
    "throttled_share": "samples with a lowered clock",
    "cpu_percent": "CPU use of the process and its workers (100 %: one core)",
    "mfu": "MFU: arithmetic for real tokens / dense peak",
    "joules_per_sample": "energy per sample",
}


def step_parts(use: Mapping[str, Any]) -> list[tuple[str, float]]:
    """(part of the time of training, its share): waiting for data, and the parts of a step; [] if no step was timed."""
    if not use.keys() >= PARTS.keys():
        return []
    wait, *computed = (float(use[key]) for key in PARTS)
    shares = [wait, *((1 - wait) * part / max(sum(computed), 1e-9) for part in computed)]
    return list(zip(PARTS.values(), shares, strict=True))


def step_rows(use: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(label, value with its unit) of what is known of the time of a step."""
    return [(label, with_unit(key, use[key])) for key, label in STEP.items() if is_number(use.get(key))]


def device_rows(use: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(label, value with its unit) of every other figure."""
    for key, value in use.items():
        if isinstance(value, Mapping):
            for name, part in value.items():
                yield f"{key.replace('_', ' ')}: {name}", f"{part:.1%}"
        elif key not in STEP and is_number(value):
            yield NAMES.get(key, key.replace("_", " ")), with_unit(key, value)
