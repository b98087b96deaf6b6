"""The HTML report of one or more runs. What a section shows is chosen here; page.html lays it out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from hwopt.config.job_sources import MixedSource, described
from hwopt.records.run_record import RunRecord, value_of
from hwopt.report import charts
from hwopt.report.charts import Chart, ChartScale, Series, line_chart
from hwopt.report.classes import Limits, class_sheets
from hwopt.report.comparison import (
    describe_ratio,
    difference_sheet,
    differences,
    figure_sheet,
    job_differences,
    speed_ratios,
    unique_names,
)
from hwopt.report.sheet import ABSENT, BASES, Sheet, gib, known, value_text
from hwopt.report.verdicts import device_rows, step_parts, step_rows, verdict
from hwopt.text import counted, cut, millions, printable

MAX_VALUE, MAX_NAME = 160, 60  # characters of a cell, and of the first cell of a row
LIMITS = Limits(classes=100, columns=20, label=60, heading=24)
"""Of the tables of classes. The numbers of all classes are in summary.json."""

CHARTS: Sequence[tuple[str, str, ChartScale, Sequence[tuple[str, str]]]] = (
    ("Loss", "", "logarithmic", (("loss", "training"), ("eval_loss", "evaluation"))),
    ("Learning rate", "", "zero", (("learning_rate", ""),)),
    ("Gradient norm", "before clipping", "logarithmic", (("grad_norm", ""),)),
    ("Throughput", "real tokens/s", "zero", (("tokens_per_second", ""),)),
    ("GPU use", "%", "zero", (("gpu_utilization", ""),)),
    ("Power", "W", "zero", (("use.power_watts", ""),)),
    ("Temperature", "°C", "range", (("use.temperature_celsius", ""),)),
    ("Waiting for data", "part of the time", "zero", (("data_wait", ""),)),
    ("Peak memory", "GiB", "zero", (("peak_memory_gib", ""),)),
)
"""(title, unit, scale, its lines: key of the rows, what it is)."""


def page_of(records: Sequence[RunRecord]) -> str:
    """The page of one or more runs. The first one is what the others are compared with."""
    names = [printable(name) for name in unique_names(records)]
    several = len(records) > 1
    found = differences([record.plan for record in records])
    return render(
        "page.html",
        f"{len(records)} runs: {', '.join(names)}" if several else names[0],
        sections=[run_section(number, name, record) for number, (name, record) in enumerate(zip(names, records, strict=True))],
        figures=figure_sheet(records, names),
        ratios=[f"{name}: {describe_ratio(ratio)}" for name, ratio in speed_ratios(records, names)],
        baseline=names[0],
        other_job=job_differences(records) if several else [],
        differing=difference_sheet(found, names, MAX_VALUE, "setting") if several else None,
        charts=list(charts_of(names, records)),
        frame={"width": charts.WIDTH, "height": charts.HEIGHT, "left": charts.LEFT, "right": charts.WIDTH - charts.RIGHT}
        | {"top": charts.TOP, "bottom": charts.HEIGHT - charts.BOTTOM},
    )


def charts_of(names: Sequence[str], records: Sequence[RunRecord]) -> Iterator[Chart]:
    """The charts that have values, and one of each metric of the evaluations."""
    metrics = dict.fromkeys(name for record in records for name in record.metric_names() if name != "loss")
    wanted = [*CHARTS, *((f"Evaluation: {name}", "", "range", ((f"eval_{name}", ""),)) for name in metrics)]
    last_step = max(record.step for record in records)
    for number, (title, unit, scale, lines) in enumerate(wanted):
        series = []
        for colour, (name, record) in enumerate(zip(names, records, strict=True)):
            for position, (key, what) in enumerate(lines):
                evaluated = key.startswith("eval_")
                rows = record.evaluations if evaluated else record.log_rows
                points = [(float(row["step"] or 0), value_of(row, key)) for row in rows if key in row]
                label = ", ".join(filter(None, (name if len(records) > 1 else "", what))) or title.lower()
                series.append(Series(label, points, colour, dashed=position > 0, marked=evaluated))
        if all(key.startswith("eval_") for key, _ in lines) and max(len(each.points) for each in series) < 2:
            continue  # the table of figures has the only value
        if chart := line_chart(f"chart-{number}", title, unit, series, last_step, scale):
            yield chart


def run_section(number: int, name: str, record: RunRecord) -> dict[str, Any]:
    """Everything that the page shows of one run alone."""
    tables: dict[str, list[Sheet]] = {
        "Plan": [plan_table(record)],
        "Memory": memory_tables(record),
        "Time of a step": [Sheet(("part", "value"), step_rows(record.use), "Time of training and its parts")],
        "Use of the device": [Sheet(("figure", "value"), list(device_rows(record.use)), "Means over the run")],
        "Classes": [
            replace(sheet, caption=f"{title}: {sheet.caption}")
            for title, details in record.class_details()
            for sheet in class_sheets(details, "label", LIMITS)
        ],
        "Settings": [settings_table(record)],
        "Versions": [versions_table(record)],
    }
    where = "{started}, from step {step:,}, in {folder}"
    return {
        "id": f"run-{number}",
        "name": name,
        "verdict": list(verdict(record)),
        "facts": list(fact_lines(record)),
        "tables": [(heading, found) for heading, found in tables.items() if any(table.rows for table in found)],
        "commands": [(where.format(**each), each["command"]) for each in record.processes],
        "step_parts": step_parts(record.use),
        "notes": record.plan.get("notes", []),
    }


def fact_lines(record: RunRecord) -> Iterator[tuple[str, str]]:
    plan = record.plan
    hardware, model, batch, data = plan["hardware"], plan["model"], plan["batch"], plan["job"].get("data", {})
    yield "profile", plan["profile"]
    yield "hardware", f"{hardware.get('name')}, {hardware.get('memory_gib')} GiB"
    yield "model", f"{model.get('architecture')}, {millions(model.get('parameters', 0))} parameters ({model.get('name')})"
    yield "task", plan["job"].get("task", {}).get("kind", "")
    train = data.get("train") or ""
    sources = (
        train if isinstance(train, str) else tuple(MixedSource(**each) if isinstance(each, dict) else each for each in train)
    )
    yield "data", described(sources) + (f", {counted(record.last['samples'], 'sample')}" if record.last else "")
    yield "batch", f"{batch.get('step')} rows a step, micro-batches of up to {batch.get('train')} rows"
    yield "folder", str(record.folder)


def plan_table(record: RunRecord) -> Sheet:
    """Each plugin: its decision and why, and what the running process showed."""
    evidence = {entry["name"]: f"{entry['status']}: {entry['seen']}" for entry in record.evidence}
    rows = []
    for entry in record.plan["plugins"]:
        options = [f"{key} {value_text(value)}" for key, value in entry["options"].items() if value is not None]
        seen = evidence.get(entry["name"], ABSENT)
        rows.append((entry["name"], entry["decision"], entry["reason"], seen, ", ".join(options)))
    columns = ("plugin", "decision", "why", "evidence in the running process", "options")
    return Sheet(columns, rows, "Plugins in the order of application")


def memory_tables(record: RunRecord) -> list[Sheet]:
    """Predicted against measured memory by kind; on a CPU only what was held."""
    plan, held, peak = record.plan.get("memory"), record.held_gib, record.peak_gib
    cuda = record.plan["hardware"].get("device_type") == "cuda"
    if not held and not plan:
        return []
    parts: Mapping[str, float] = plan["parts"] if plan else {}
    kinds = [kind for kind in ("weights", "optimizer_state", "masters") if held.get(kind) or parts.get(kind)]
    found = [(kind.replace("_", " "), parts.get(kind), held.get(kind)) for kind in kinds]
    if cuda:
        rest = None if peak is None else peak - sum(held.get(kind, 0.0) for kind in kinds)
        others = sum(parts.get(kind, 0.0) for kind in ("gradients", "activations", "temporary")) if plan else None
        found.append(("gradients, activations and temporary", others, rest))
    predicted = max(plan["peak_gib"], plan.get("eval_peak_gib") or 0.0) if plan else None
    found.append(("peak" if cuda else "peak of the process (resident)", predicted, peak))
    note = f"Predicted: {BASES[plan['tier']]}, {plan['error']}." if plan else "Memory was not predicted for this run."
    note += " Measured: weights and states after step 1, the peak over the run." if cuda else " Measured after step 1."
    rows = [(kind, known(before, gib), known(after, gib)) for kind, before, after in found]
    return [Sheet(("kind", "predicted", "measured"), rows, "Memory by kind", note)]


def settings_table(record: RunRecord) -> Sheet:
    """Every hyperparameter and key of the job that has a value."""
    plan = record.plan
    tables = {"training": plan["training"]} | plan["job"]
    rows = [
        (f"{name}.{key}", value_text(value), plan.get("provenance", {}).get(f"{name}.{key}", "default"))
        for name, values in tables.items()
        for key, value in values.items()
        if value is not None and value != []
    ]
    return Sheet(("setting", "value", "from"), rows, "Settings of the job")


def versions_table(record: RunRecord) -> Sheet:
    own = [(key.replace("_", " "), record.last[key]) for key in ("hwopt", "python", "operating_system") if record.last]
    return Sheet(("package", "version"), [*own, *record.plan["software"].items()], "Versions of the newest process")


def render(template: str, title: str, **values: Any) -> str:
    """The page that `template` makes of `values`: it loads nothing, has a light and a dark theme, and escapes every text."""
    environment = Environment(
        loader=PackageLoader("hwopt", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value,
    )
    environment.filters["shortened"] = lambda sheet: sheet.shortened(MAX_NAME, MAX_VALUE)
    return environment.get_template(template).render(title=cut(printable(title), 200), version=version("hwopt"), **values)
