"""Two or more runs, or plans, side by side: their figures, what differs in their plans, and the ratio of their speeds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hwopt.records.run_record import RunRecord
from hwopt.records.throughput import Ratio, rate, rate_ratio
from hwopt.report.memory import gib, time_range

ABSENT = "-"
JOB_TABLES = ("model", "data", "task")
"""Tables of a job in which runs of the same job agree."""
HARDWARE = ("name", "memory_gib", "memory_limit_gib", "count", "cpu_cores")


@dataclass(frozen=True)
class Quantity:
    """A row of the table: a value of each run."""

    label: str
    values: Sequence[str]


@dataclass(frozen=True)
class Difference:
    """A key of the plans whose values differ; None: a plan has no such key."""

    key: str
    values: Sequence[Any]


def unique_names(records: Sequence[RunRecord]) -> list[str]:
    """The names of the run folders; their paths if two names are equal."""
    names = [record.name for record in records]
    return names if len(set(names)) == len(names) else [str(record.folder) for record in records]


def figures(record: RunRecord) -> dict[str, Any]:
    """The figures of a run as JSON types; None: not measured."""
    windows = record.windows
    best = {name: record.best(name) for name in record.metric_names()}
    return {
        "state": record.state,
        "exit_code": record.exit_code,
        "step": record.step,
        "seconds_per_epoch": record.seconds_per_epoch,
        "train_runtime_seconds": record.summary.get("train_runtime"),
        "samples_per_second": rate(windows, "samples"),
        "tokens_per_second": rate(windows, "tokens"),
        "windows": len(windows),
        "peak_memory_gib": record.peak_gib,
        "gpu_use_percent": record.gpu_use,
        "mfu": record.use.get("mfu"),
        "joules_per_sample": record.use.get("joules_per_sample"),
        "data_wait": record.data_wait,
        "best": {name: {"value": found.value, "step": found.step} for name, found in best.items() if found},
        "test": record.test_metrics(),
    }


def quantities(records: Sequence[RunRecord]) -> list[Quantity]:
    """The rows of the table of runs; without rows that no run has a value for."""
    found = [figures(record) for record in records]

    def row(label: str, key: str, form: str, unit: str = "") -> Quantity:
        values = [each[key] for each in found]
        return Quantity(label, [ABSENT if value is None else f"{value:{form}}{unit}" for value in values])

    rows = [
        Quantity("state", [each["state"] for each in found]),
        row("time per epoch", "seconds_per_epoch", ",.4g", " s"),
        row("training time", "train_runtime_seconds", ",.1f", " s"),
        row("samples/s", "samples_per_second", ",.4g"),
        row("real tokens/s", "tokens_per_second", ",.0f"),
        Quantity("peak memory", [ABSENT if each["peak_memory_gib"] is None else gib(each["peak_memory_gib"]) for each in found]),
        row("mean GPU use", "gpu_use_percent", ".0f", " %"),
        row("MFU", "mfu", ".1%"),
        row("energy per sample", "joules_per_sample", ".3g", " J"),
        row("waiting for data", "data_wait", ".1%"),
    ]
    for kind in ("best", "test"):
        names = dict.fromkeys(name for each in found for name in each[kind])
        rows += [Quantity(f"{kind} {name}", [metric_text(each[kind].get(name)) for each in found]) for name in names]
    return [row for row in rows if any(value != ABSENT for value in row.values)]


def metric_text(found: Any) -> str:
    """A metric, with the step of its evaluation if it is the best of several."""
    if found is None:
        return ABSENT
    return f"{found['value']:.4f} (step {found['step']:,})" if isinstance(found, Mapping) else f"{found:.4f}"


def plan_quantities(plans: Sequence[Mapping[str, Any]]) -> list[Quantity]:
    """The rows of the table of plans, all predicted."""
    memory = [plan["memory"] for plan in plans]
    times = [each["time"] for each in memory]
    steps = [plan["batch"]["step"] for plan in plans]
    peaks = [max(each["peak_gib"], each["eval_peak_gib"] or 0.0) for each in memory]
    fits = [{True: "yes", False: "no", None: "unknown"}[each["fits"]] for each in memory]
    return [
        Quantity("card", [plan["hardware"]["name"] for plan in plans]),
        Quantity("fits", fits),
        Quantity("peak memory", [f"{gib(peak)} of {each['free_gib']:.2f} GiB" for peak, each in zip(peaks, memory, strict=True)]),
        Quantity("time per epoch", [span(time, "epoch") for time in times]),
        Quantity("training time", [span(time, "total") for time in times]),
        Quantity("time per step", [span(time, "step") for time in times]),
        Quantity("samples/s", [speed_range(rows, time) for rows, time in zip(steps, times, strict=True)]),
    ]


def span(time: Mapping[str, Any] | None, key: str) -> str:
    """A predicted time with its unit."""
    return ABSENT if time is None or time[key] is None else time_range(tuple(time[key]))


def speed_range(rows: int, time: Mapping[str, Any] | None) -> str:
    """The predicted samples per second of steps of `rows` rows."""
    if time is None:
        return ABSENT
    low, high = rows / time["step"][1], rows / time["step"][0]
    form = ",.0f" if low >= 100 else ".3g"
    return f"{low:{form}} to {high:{form}}"


def speed_ratios(records: Sequence[RunRecord]) -> Iterator[tuple[RunRecord, Ratio]]:
    """(run, its samples per second over those of the first run), for each run after the first that can be compared."""
    for record in records[1:]:
        if ratio := rate_ratio(record.windows, records[0].windows, "samples"):
            yield record, ratio


def describe_ratio(ratio: Ratio) -> str:
    """The ratio, its noise, and what the noise comes from."""
    if ratio.low is None or ratio.high is None:
        return f"{ratio.value:.3f} times the samples/s; noise unknown: {ratio.windows} log interval(s), 3 are needed"
    basis = "the same samples in each" if ratio.paired else "not the same samples"
    clear = "" if ratio.clear else "; no clear difference"
    noise = f"{ratio.low:.3f} to {ratio.high:.3f} ({ratio.windows} log intervals, {basis})"
    return f"{ratio.value:.3f} times the samples/s, {noise}{clear}"


def differences(plans: Sequence[Mapping[str, Any]]) -> list[Difference]:
    """The keys whose values differ, as `--set` spells them, in the order of the plans."""
    flat = [dict(flattened(plan)) for plan in plans]
    keys = dict.fromkeys(key for each in flat for key in each)
    rows = [Difference(key, [each.get(key) for each in flat]) for key in keys]
    return [row for row in rows if any(value != row.values[0] for value in row.values)]


def flattened(plan: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of what a plan sets. A plugin that is skipped has no options."""
    yield "profile", plan["profile"]
    yield from ((f"hardware.{key}", plan["hardware"].get(key)) for key in HARDWARE)
    yield "world_size", plan.get("world_size")
    for entry in plan["plugins"]:
        on = entry["decision"] != "skip"
        yield f"plugins.{entry['name']}", "on" if on else "skipped"
        yield from ((f"plugins.{entry['name']}.{key}", value) for key, value in entry["options"].items() if on)
    yield from ((f"batch.{key}", value) for key, value in plan["batch"].items())
    yield from ((f"training.{key}", value) for key, value in plan["training"].items())
    for table in JOB_TABLES:
        yield from ((f"{table}.{key}", value) for key, value in plan["job"].get(table, {}).items())
    yield from ((f"software.{key}", value) for key, value in plan["software"].items())


def job_differences(records: Sequence[RunRecord]) -> list[str]:
    """What makes the runs ones of different jobs: keys of model, data and task, or the content of the data."""
    found = [each.key for each in differences([record.plan for record in records]) if each.key.split(".")[0] in JOB_TABLES]
    stores = [record.last.get("data") for record in records]
    if not all(isinstance(store, Mapping) for store in stores):
        return found
    found = [key for key in found if not key.startswith("data.")]  # the same samples may come from another path
    parts = dict.fromkeys(part for store in stores if store for part in store)
    changed = [part for part in parts if len({store.get(part) for store in stores if store}) > 1]
    return [*found, *(f"the samples of data.{part}" for part in changed)]


def shown(value: Any) -> str:
    """A value of a plan as text."""
    if value is None:
        return ABSENT
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def predicted_ratio(plan: Mapping[str, Any], baseline: Mapping[str, Any]) -> tuple[float, float] | None:
    """The predicted samples/s of `plan` over those of `baseline`, of the fast ends and of the slow ends, in ascending order."""
    times = [each["memory"]["time"] for each in (plan, baseline)]
    if None in times:
        return None
    rows = plan["batch"]["step"] / baseline["batch"]["step"]
    ends = sorted(rows * theirs / ours for ours, theirs in zip(times[0]["step"], times[1]["step"], strict=True))
    return ends[0], ends[1]


def describe_predicted_ratio(plan: Mapping[str, Any], baseline: Mapping[str, Any]) -> str:
    """The predicted ratio; "" without a prediction."""
    ratio = predicted_ratio(plan, baseline)
    if ratio is None:
        return ""
    return f"{ratio[0]:.2f} to {ratio[1]:.2f} times the samples/s ({plan['memory']['time']['basis']})"


def runs_to_dict(records: Sequence[RunRecord]) -> dict[str, Any]:
    """What `hwopt compare RUN RUN --format json` prints."""
    plans = [record.plan for record in records]
    named = {id(record): str(record.folder) for record in records}
    ratios = [
        {"run": named[id(record)], "samples_per_second_ratio": asdict(ratio) | {"clear": ratio.clear}}
        for record, ratio in speed_ratios(records)
    ]
    return {
        "runs": [{"folder": str(record.folder)} | figures(record) for record in records],
        "against": str(records[0].folder),
        "ratios": ratios,
        "different_job": job_differences(records),
        "differences": [asdict(each) for each in differences(plans)],
    }


def plans_to_dict(plans: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What `hwopt compare PROFILE PROFILE --format json` prints."""
    ratios = [{"profile": plan["profile"], "samples_per_second_ratio": predicted_ratio(plan, plans[0])} for plan in plans[1:]]
    return {
        "profiles": [{key: plan[key] for key in ("profile", "hardware", "batch", "memory")} for plan in plans],
        "against": plans[0]["profile"],
        "ratios": ratios,
        "differences": [asdict(each) for each in differences(plans)],
    }
