"""What a report says of a run: how it ended, whether it fits, what is proven, how good the model is, and where its time went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hwopt.records.run_files import is_number
from hwopt.records.run_record import RunRecord
from hwopt.report.sheet import gib, with_unit

Grade = Literal["good", "bad", "open", "result"]
"""What a line means for the reader: fine, a problem, not known yet, or a figure to judge."""


@dataclass(frozen=True)
class Line:
    """One statement of the verdict."""

    label: str
    text: str
    grade: Grade


def verdict(record: RunRecord) -> Iterator[Line]:
    """The statements that the files of the run support, the most important one first."""
    yield outcome(record)
    yield from fit(record)
    yield from proof(record)
    yield from limit(record)
    yield from quality(record)


def outcome(record: RunRecord) -> Line:
    """How the run ended, or that it trains."""
    if record.complete:
        return Line("run", record.state, "good")
    if record.exit_code is not None:
        return Line("run", f"{record.state}: {record.message}", "bad")
    return Line("run", record.state, "bad" if record.lost else "open")


def fit(record: RunRecord) -> Iterator[Line]:
    """Whether the memory is enough: measured if the run trained, else predicted."""
    plan, peak = record.plan.get("memory"), record.peak_gib
    hardware = record.plan["hardware"]
    if record.exit_code == 7:
        yield Line("memory", "does not fit into the device's memory", "bad")
    elif peak is not None and hardware.get("device_type") == "cuda":
        predicted = f"; predicted {gib(max(plan['peak_gib'], plan.get('eval_peak_gib') or 0.0))}" if plan else ""
        yield Line("memory", f"fits: {gib(peak)} of {hardware.get('memory_gib')} GiB at the peak{predicted}", "good")
    elif peak is not None:
        yield Line("memory", f"the process took {gib(peak)} of {hardware.get('memory_gib')} GiB of host memory", "result")
    elif plan:
        word = {True: "fits", False: "does not fit", None: "unknown"}[plan["fits"]]
        yield Line("memory", f"{word}, predicted: {gib(plan['peak_gib'])} of {plan['free_gib']:.2f} GiB free", "open")


def proof(record: RunRecord) -> Iterator[Line]:
    """How many plugins are active in the running process, and which are not."""
    if not record.evidence:
        yield Line("evidence", "none: no step was observed", "open")
        return
    counts = Counter(entry["status"] for entry in record.evidence)
    others = ["{name} is {status} ({seen})".format(**each) for each in record.evidence if each["status"] != "active"]
    text = f"{counts['active']} of {len(record.evidence)} plugins are active in the running process"
    grade: Grade = "bad" if counts["inactive"] else "open" if others else "good"
    yield Line("evidence", "; ".join([text, *others]), grade)


def limit(record: RunRecord) -> Iterator[Line]:
    """What limits the speed of the run, and the setting to change next."""
    if found := record.summary.get("verdict"):
        grade: Grade = "good" if found["limit"] in ("compute-bound", "memory-bound") else "bad"
        yield Line("speed", f"{found['limit']}: {found['figure']}. Next: {found['next']}", grade)


def quality(record: RunRecord) -> Iterator[Line]:
    for key, value in record.summary.items():
        if key.startswith("best_eval_") and is_number(value):
            step = int(record.summary.get("best_step", 0))
            yield Line("model", f"{key.removeprefix('best_')} {value:.4f}, the best evaluation, of step {step:,}", "result")
            return


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
