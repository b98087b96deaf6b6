"""Two or more runs, or plans, side by side: their figures, what differs in their plans, and the ratio of their speeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console

from hwopt.config.task_kinds import task_facts
from hwopt.records.run_record import RunRecord
from hwopt.records.throughput import RateRatio, rate, rate_ratio
from hwopt.report.sheet import ABSENT, YES_OR_NO, Sheet, gib, known, largest_text, margin_text, seconds_text, value_text
from hwopt.report.terminal import say, show_sheet
from hwopt.text import cut

JOB_TABLES = ("model", "data", "task")  # tables of a job in which runs of the same job agree
HARDWARE = ("name", "memory_gib", "memory_limit_gib", "count", "cpu_cores")
Differences = Mapping[str, Sequence[Any]]  # key -> its value in each plan; None: the plan has no such key

FIGURES: Mapping[str, tuple[str, Callable[[Any], str]]] = {
    "state": ("state", str),
    "time per epoch": ("seconds_per_epoch", "{:,.4g} s".format),
    "training time": ("train_runtime_seconds", "{:,.1f} s".format),
    "samples/s": ("samples_per_second", "{:,.4g}".format),
    "real tokens/s": ("tokens_per_second", "{:,.0f}".format),
    "peak memory": ("peak_memory_gib", gib),
    "mean GPU use": ("gpu_use_percent", "{:.0f} %".format),
    "MFU": ("mfu", "{:.1%}".format),
    "energy per sample": ("joules_per_sample", "{:.3g} J".format),
    "waiting for data": ("data_wait", "{:.1%}".format),
}
"""Label -> (key of `figures`, how it is shown)."""


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
        "best": {name: found._asdict() for name, found in best.items() if found},
        "test": record.test_metrics(),
    }


def figure_sheet(records: Sequence[RunRecord], names: Sequence[str]) -> Sheet:
    """The figures of runs, without rows that no run has a value for."""
    found = [figures(record) for record in records]
    rows = [(label, *(known(each[key], shown) for each in found)) for label, (key, shown) in FIGURES.items()]
    for kind in ("best", "test"):
        metrics = dict.fromkeys(name for each in found for name in each[kind])
        rows += [(f"{kind} {name}", *(known(each[kind].get(name), metric_text) for each in found)) for name in metrics]
    return Sheet(("", *names), [row for row in rows if set(row[1:]) != {ABSENT}], "Key figures")


def metric_text(found: Any) -> str:
    """A metric, with the step of its evaluation if it is the best of several."""
    return f"{found['value']:.4f} (step {found['step']:,})" if isinstance(found, Mapping) else f"{found:.4f}"


def plan_sheet(plans: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Sheet:
    """The figures of plans, all predicted."""

    def fits(plan: Mapping[str, Any]) -> str:
        memory = plan["memory"]
        why = memory["note"] if memory["fits"] is None else margin_text(memory["margin_gib"])
        return f"{YES_OR_NO[memory['fits']]}: {why}" + ("" if memory["host_fits"] else ", not enough host memory")

    def peak(plan: Mapping[str, Any]) -> str:
        memory = plan["memory"]
        return f"{gib(max(memory['peak_gib'], memory['eval_peak_gib'] or 0.0))} of {memory['free_gib']:.2f} GiB"

    def micro_batch(plan: Mapping[str, Any]) -> str:
        memory, images = plan["memory"], task_facts(plan["job"]["task"]["kind"]).inputs == "images"
        size = f"{memory['rows']} images" if images else f"{memory['rows']} x {memory['width']}"
        return f"{size}, {plan['batch']['step']} rows per step"

    def changed(plan: Mapping[str, Any]) -> str:
        plugins = (f"{entry['name']} {entry['decision']}" for entry in plan["plugins"] if entry["decision"] != "apply")
        return ", ".join(plugins) or ABSENT

    def speed(plan: Mapping[str, Any]) -> str:
        ends = (plan["batch"]["step"] / seconds for seconds in reversed(plan["memory"]["time"]["step"]))
        return " to ".join(f"{end:,.0f}" if end >= 100 else f"{end:.3g}" for end in ends)

    def time(key: str) -> Callable[[Mapping[str, Any]], str]:
        return lambda plan: known((plan["memory"]["time"] or {}).get(key), lambda ends: seconds_text(*ends))

    rows: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
        "card": lambda plan: str(plan["hardware"]["name"]),
        "fits": fits,
        "peak memory": peak,
        "micro-batch": micro_batch,
        "largest micro-batch": lambda plan: known(plan["memory"]["largest_train"], largest_text),
        "time per epoch": time("epoch"),
        "training time": time("total"),
        "time per step": time("step"),
        "samples/s": lambda plan: speed(plan) if plan["memory"]["time"] else ABSENT,
        "skipped or changed": changed,
    }
    return Sheet(("", *names), [(label, *map(shown, plans)) for label, shown in rows.items()])


def speed_ratios(records: Sequence[RunRecord], names: Sequence[str]) -> Iterator[tuple[str, RateRatio]]:
    """(name, its samples per second over those of the first run), for each run after the first that can be compared."""
    for record, name in zip(records[1:], names[1:], strict=True):
        if ratio := rate_ratio(record.windows, records[0].windows, "samples"):
            yield name, ratio


def describe_ratio(ratio: RateRatio) -> str:
    """The ratio, its noise, and what the noise comes from."""
    if ratio.low is None or ratio.high is None:
        return f"{ratio.value:.3f} times the samples/s; noise unknown: {ratio.windows} log interval(s), 3 are needed"
    basis = "the same samples in each" if ratio.paired else "not the same samples"
    clear = "" if ratio.clear else "; no clear difference"
    noise = f"{ratio.low:.3f} to {ratio.high:.3f} ({ratio.windows} log intervals, {basis})"
    return f"{ratio.value:.3f} times the samples/s, {noise}{clear}"


def differences(plans: Sequence[Mapping[str, Any]]) -> Differences:
    """The keys whose values differ, as `--set` spells them, in the order of the plans."""
    flat = [dict(plan_values(plan)) for plan in plans]
    keys = dict.fromkeys(key for each in flat for key in each)
    found = {key: [each.get(key) for each in flat] for key in keys}
    return {key: values for key, values in found.items() if any(value != values[0] for value in values)}


def difference_sheet(found: Differences, names: Sequence[str], longest: int, heading: str) -> Sheet:
    """`differences` as a table, with values of at most `longest` characters."""
    rows = [(key, *(cut(value_text(value), longest) for value in values)) for key, values in found.items()]
    return Sheet((heading, *names), rows, "What differs in the plans")


def plan_values(plan: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of what a plan sets. A plugin that is skipped has no options."""
    yield "profile", plan["profile"]
    yield from ((f"hardware.{key}", plan["hardware"].get(key)) for key in HARDWARE)
    yield "world_size", plan.get("world_size")
    for entry in plan["plugins"]:
        on = entry["decision"] != "skip"
        yield f"plugins.{entry['name']}", "on" if on else "skipped"
        yield from ((f"plugins.{entry['name']}.{key}", value) for key, value in entry["options"].items() if on)
    for name in ("batch", "training", *JOB_TABLES, "software"):
        table = (plan["job"] if name in JOB_TABLES else plan).get(name, {})
        yield from ((f"{name}.{key}", value) for key, value in table.items())


def job_differences(records: Sequence[RunRecord]) -> list[str]:
    """What makes the runs ones of different jobs: keys of model, data and task, or the content of the data."""
    found = [key for key in differences([record.plan for record in records]) if key.split(".")[0] in JOB_TABLES]
    stores = [record.last.get("data") for record in records]
    if not all(isinstance(store, Mapping) for store in stores):
        return found
    found = [key for key in found if not key.startswith("data.")]  # the same samples may come from another path
    parts = dict.fromkeys(part for store in stores if store for part in store)
    changed = [part for part in parts if len({store.get(part) for store in stores if store}) > 1]
    return [*found, *(f"the samples of data.{part}" for part in changed)]


def predicted_ratio(plan: Mapping[str, Any], baseline: Mapping[str, Any]) -> tuple[float, float] | None:
    """The predicted samples/s of `plan` over those of `baseline`, of the fast ends and of the slow ends, in ascending order."""
    times = [each["memory"]["time"] for each in (plan, baseline)]
    if None in times:
        return None
    rows = plan["batch"]["step"] / baseline["batch"]["step"]
    ends = sorted(rows * theirs / ours for ours, theirs in zip(times[0]["step"], times[1]["step"], strict=True))
    return ends[0], ends[1]


def show_runs(console: Console, records: Sequence[RunRecord]) -> None:
    """Print the figures of runs, their speeds against the first one, and what differs in their plans."""
    names = unique_names(records)
    show_sheet(console, figure_sheet(records, names))
    for name, ratio in speed_ratios(records, names):
        say(console, f"{name} against {names[0]}", describe_ratio(ratio))
    if others := job_differences(records):
        say(console, "different jobs", f"{', '.join(others)} differ: speeds and metrics are not comparable", "bold yellow")
    show_differences(console, names, differences([record.plan for record in records]))


def show_plans(console: Console, plans: Sequence[Mapping[str, Any]]) -> None:
    """Print the predicted figures of plans, their speeds against the first one, and what differs."""
    names = [str(plan["profile"]) for plan in plans]
    show_sheet(console, plan_sheet(plans, names))
    for name, plan in zip(names[1:], plans[1:], strict=True):
        if ratio := predicted_ratio(plan, plans[0]):
            text = f"{ratio[0]:.2f} to {ratio[1]:.2f} times the samples/s ({plan['memory']['time']['basis']})"
            say(console, f"{name} against {names[0]}", text)
    show_differences(console, names, differences(plans))


def show_differences(console: Console, names: Sequence[str], found: Differences) -> None:
    console.print()
    if found:
        show_sheet(console, difference_sheet(found, names, 48, "differs"))
    else:
        say(console, "plan", "no difference")


def runs_to_dict(records: Sequence[RunRecord]) -> dict[str, Any]:
    """What `hwopt compare RUN RUN --format json` prints."""
    folders = [str(record.folder) for record in records]
    ratios = {folder: asdict(ratio) | {"clear": ratio.clear} for folder, ratio in speed_ratios(records, folders)}
    return {
        "runs": [{"folder": str(record.folder)} | figures(record) for record in records],
        "against": folders[0],
        "ratios": [{"run": folder, "samples_per_second_ratio": ratio} for folder, ratio in ratios.items()],
        "different_job": job_differences(records),
        "differences": listed(differences([record.plan for record in records])),
    }


def plans_to_dict(plans: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What `hwopt compare PROFILE PROFILE --format json` prints."""
    first, kept = plans[0], ("profile", "hardware", "batch", "memory")
    return {
        "profiles": [{key: plan[key] for key in kept} for plan in plans],
        "against": first["profile"],
        "ratios": [{"profile": each["profile"], "samples_per_second_ratio": predicted_ratio(each, first)} for each in plans[1:]],
        "differences": listed(differences(plans)),
    }


def listed(found: Differences) -> list[dict[str, Any]]:
    return [{"key": key, "values": values} for key, values in found.items()]
