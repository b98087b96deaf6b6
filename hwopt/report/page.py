"""The HTML report of one or more runs: one file that loads nothing, with charts as inline SVG, in a light and a dark theme.

`page_of` fills page.html, which escapes every text. What a section shows is chosen here; a section without data is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from hwopt.records.run_record import RunRecord
from hwopt.report import charts
from hwopt.report.charts import Chart, ChartScale, Series, line_chart
from hwopt.report.classes import CORNER, Limits, Sheet, class_sheets
from hwopt.report.comparison import (
    Difference,
    describe_ratio,
    differences,
    job_differences,
    quantities,
    shown,
    speed_ratios,
    unique_names,
)
from hwopt.report.measurements import TimePart, device_rows, step_parts, step_rows
from hwopt.report.memory import gib
from hwopt.report.verdicts import Line, verdict
from hwopt.text import cut, printable

MAX_VALUE = 160
"""Characters of a value of a plan."""
LIMITS = Limits(classes=100, columns=20, label=60, heading=24)
"""Of the tables of classes. The numbers of all classes are in summary.json."""

CHARTS: Sequence[tuple[str, str, ChartScale, Sequence[tuple[str, str, str]]]] = (
    ("Loss", "", "logarithmic", (("loss", "training", "log"), ("eval_loss", "evaluation", "eval"))),
    ("Learning rate", "", "zero", (("learning_rate", "", "log"),)),
    ("Gradient norm", "before clipping", "logarithmic", (("grad_norm", "", "log"),)),
    ("Throughput", "real tokens/s", "zero", (("tokens_per_second", "", "log"),)),
    ("GPU use", "%", "zero", (("gpu_utilization", "", "log"),)),
    ("Power", "W", "zero", (("use.power_watts", "", "log"),)),
    ("Temperature", "°C", "range", (("use.temperature_celsius", "", "log"),)),
    ("Waiting for data", "part of the time", "zero", (("data_wait", "", "log"),)),
    ("Peak memory", "GiB", "zero", (("peak_memory_gib", "", "log"),)),
)
"""(title, unit, scale, its lines: key of the rows, what it is, kind of row)."""


@dataclass(frozen=True)
class Table:
    """A table whose first column names the row."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str
    note: str = ""

    def is_number(self, column: int) -> bool:
        """Whether all cells of a column after the first one are numbers, with or without a unit."""
        return column > 0 and all(row[column][:1].isdigit() or row[column] == "-" for row in self.rows)


@dataclass(frozen=True)
class RunSection:
    """Everything that the page shows of one run alone. `id` is unique in the page."""

    id: str
    name: str
    colour: int
    verdict: Sequence[Line]
    facts: Sequence[tuple[str, str]]
    tables: Sequence[tuple[str, Sequence[Table]]]
    """(heading, tables)."""
    commands: Sequence[tuple[str, str]]
    """(when and where, the command) of each process."""
    step_parts: Sequence[TimePart]
    """What the time of training is spent on, for a bar; empty if no step was timed."""
    notes: Sequence[str] = field(default=())


def page_of(records: Sequence[RunRecord]) -> str:
    """The page of one or more runs. The first one is what the others are compared with."""
    names = [printable(name) for name in unique_names(records)]
    several = len(records) > 1
    sections = [run_section(number, name, record) for number, (name, record) in enumerate(zip(names, records, strict=True))]
    title = f"{len(records)} runs: {', '.join(names)}" if several else names[0]
    environment = Environment(
        loader=PackageLoader("hwopt", "report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("page.html").render(
        title=cut(title, 200),
        version=version("hwopt"),
        sections=sections,
        figures=Table(("", *names), [(row.label, *row.values) for row in quantities(records)], "Key figures"),
        ratios=[f"{name_of(record, records, names)}: {describe_ratio(ratio)}" for record, ratio in speed_ratios(records)],
        baseline=names[0],
        other_job=job_differences(records) if several else [],
        differing=difference_table(names, differences([record.plan for record in records])) if several else None,
        charts=list(charts_of(names, records)),
        frame={"width": charts.WIDTH, "height": charts.HEIGHT, "left": charts.LEFT, "right": charts.WIDTH - charts.RIGHT}
        | {"top": charts.TOP, "bottom": charts.HEIGHT - charts.BOTTOM},
    )


def name_of(record: RunRecord, records: Sequence[RunRecord], names: Sequence[str]) -> str:
    return next(name for each, name in zip(records, names, strict=True) if each is record)


def charts_of(names: Sequence[str], records: Sequence[RunRecord]) -> Iterator[Chart]:
    """The charts that have values, and one of each metric of the evaluations."""
    metrics = dict.fromkeys(name for record in records for name in record.metric_names() if name != "loss")
    wanted = [*CHARTS, *((f"Evaluation: {name}", "", "range", ((f"eval_{name}", "", "eval"),)) for name in metrics)]
    last_step = max(record.step for record in records)
    for number, (title, unit, scale, lines) in enumerate(wanted):
        series = []
        for colour, (name, record) in enumerate(zip(names, records, strict=True)):
            for position, (key, what, kind) in enumerate(lines):
                rows = record.evaluations if kind == "eval" else record.log_rows
                points = [(float(row["step"] or 0), row[key]) for row in rows if key in row]
                label = ", ".join(filter(None, (name if len(records) > 1 else "", what))) or title.lower()
                series.append(Series(label, points, colour, dashed=position > 0, marked=kind == "eval"))
        if all(kind == "eval" for _, _, kind in lines) and max(len(each.points) for each in series) < 2:
            continue  # the table of figures has the only value
        if chart := line_chart(f"chart-{number}", title, unit, series, last_step, scale):
            yield chart


def run_section(number: int, name: str, record: RunRecord) -> RunSection:
    tables = [
        ("Plan", [plan_table(record)]),
        ("Memory", memory_tables(record)),
        ("Time of a step", [table(("part", "value"), step_rows(record.use), "Time of training and its parts")]),
        ("Use of the device", [table(("figure", "value"), list(device_rows(record.use)), "Means over the run")]),
        ("Classes", class_tables(record)),
        ("Settings", [settings_table(record)]),
        ("Versions", [versions_table(record)]),
    ]
    commands = [
        (
            f"{each.get('started', '')}, from step {each.get('step', 0):,}, in {each.get('folder', '')}",
            str(each.get("command", "")),
        )
        for each in record.processes
    ]
    notes = [printable(note) for note in record.plan.get("notes", [])]
    facts = [(label, printable(value)) for label, value in facts_of(record)]
    shown_tables = [(heading, found) for heading, found in tables if any(table.rows for table in found)]
    return RunSection(
        f"run-{number}",
        name,
        number % charts.COLOURS,
        verdict(record),
        facts,
        shown_tables,
        commands,
        step_parts(record.use),
        notes,
    )


def facts_of(record: RunRecord) -> Iterator[tuple[str, str]]:
    """What was trained, on what."""
    plan = record.plan
    hardware, model, batch = plan["hardware"], plan["model"], plan["batch"]
    yield "profile", str(plan["profile"])
    yield "hardware", f"{hardware.get('name')}, {hardware.get('memory_gib')} GiB"
    yield "model", f"{model.get('architecture')}, {model.get('parameters', 0) / 1e6:,.1f} M parameters ({model.get('name')})"
    yield "task", str(plan["job"].get("task", {}).get("kind", ""))
    yield "data", f"{plan['job'].get('data', {}).get('train')}" + (f", {record.last['samples']:,} samples" if record.last else "")
    yield "batch", f"{batch.get('step')} rows a step, micro-batches of up to {batch.get('train')} rows"
    yield "folder", str(record.folder)


def plan_table(record: RunRecord) -> Table:
    """Each plugin: its decision and why, and what the running process showed."""
    evidence = {entry["name"]: f"{entry['status']}: {entry['seen']}" for entry in record.evidence}
    rows = [
        (
            entry["name"],
            entry["decision"],
            entry["reason"],
            evidence.get(entry["name"], "-"),
            ", ".join(f"{key} {shown(value)}" for key, value in entry["options"].items() if value is not None),
        )
        for entry in record.plan["plugins"]
    ]
    columns = ("plugin", "decision", "why", "evidence in the running process", "options")
    return table(columns, rows, "Plugins in the order of application")


def memory_tables(record: RunRecord) -> list[Table]:
    """Predicted against measured memory by kind; on a CPU only what was held."""
    plan, held = record.plan.get("memory"), record.held_gib
    peak = record.peak_gib
    cuda = record.plan["hardware"].get("device_type") == "cuda"
    if not held and not plan:
        return []
    parts: Mapping[str, float] = plan["parts"] if plan else {}
    kinds = [kind for kind in ("weights", "optimizer_state", "masters") if held.get(kind) or parts.get(kind)]
    rows = [(kind.replace("_", " "), size(parts.get(kind)), size(held.get(kind))) for kind in kinds]
    rest = None if peak is None or not cuda else peak - sum(held.get(kind, 0.0) for kind in kinds)
    others = sum(parts.get(kind, 0.0) for kind in ("gradients", "activations", "temporary")) if plan else None
    if cuda:
        rows.append(("gradients, activations and temporary", size(others), size(rest)))
    predicted = max(plan["peak_gib"], plan.get("eval_peak_gib") or 0.0) if plan else None
    rows.append(("peak" if cuda else "peak of the process (resident)", size(predicted), size(peak)))
    note = f"Predicted: {plan['tier']}, {plan['error']}." if plan else "Memory was not predicted for this run."
    note += " Measured: weights and states after step 1, the peak over the run." if cuda else " Measured after step 1."
    return [table(("kind", "predicted", "measured"), rows, "Memory by kind", note)]


def size(value: float | None) -> str:
    return "-" if value is None else gib(value)


def class_tables(record: RunRecord) -> list[Table]:
    """The metrics of each class and the confusion matrix, of the best evaluation and of the test."""
    found = []
    for title, details in record.class_details():
        for sheet in class_sheets(details, "label", LIMITS):
            what = "confusion matrix" if sheet.columns[0] == CORNER else "classes"
            found.append(from_sheet(sheet, f"{title}: {what}"))
    return found


def from_sheet(sheet: Sheet, caption: str) -> Table:
    return table(sheet.columns, sheet.rows, caption, sheet.note)


def settings_table(record: RunRecord) -> Table:
    """Every hyperparameter and key of the job that has a value."""
    plan = record.plan
    tables = {"training": plan["training"]} | plan["job"]
    rows = [
        (f"{name}.{key}", shown(value), str(plan.get("provenance", {}).get(f"{name}.{key}", "default")))
        for name, values in tables.items()
        for key, value in values.items()
        if value is not None and value != []
    ]
    return table(("setting", "value", "from"), rows, "Settings of the job")


def versions_table(record: RunRecord) -> Table:
    last = record.last
    own = [
        (name, str(last[key])) for name, key in (("hwopt", "hwopt"), ("python", "python"), ("system", "operating_system")) if last
    ]
    return table(("package", "version"), [*own, *record.plan["software"].items()], "Versions of the newest process")


def difference_table(names: Sequence[str], found: Sequence[Difference]) -> Table:
    rows = [(each.key, *(shown(value) for value in each.values)) for each in found]
    return table(("setting", *names), rows, "What differs in the plans")


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]], caption: str, note: str = "") -> Table:
    """A table whose cells are shortened and show control characters."""
    cells = [[cut(printable(str(cell)), MAX_VALUE if number else 60) for number, cell in enumerate(row)] for row in rows]
    return Table([printable(column) for column in columns], cells, caption, note)
