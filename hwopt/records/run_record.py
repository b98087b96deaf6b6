"""RunRecord: what a run left in its folder, finished or not, and the figures that reports show of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from hwopt.records.throughput import Window, windows_of
from hwopt.text import counted

MetricRow = Mapping[str, float | None]  # a line of metrics.jsonl. None: the value was not finite

TIMING = ("runtime", "samples_per_second")  # what an evaluation reports beside its metrics


class Best(NamedTuple):
    """The best value of a metric, and the step of its evaluation."""

    value: float
    step: int


@dataclass(frozen=True)
class RunRecord:
    """The files of a run folder, read by hwopt.runs.record."""

    folder: Path
    plan: Mapping[str, Any]  # plan.json
    processes: Sequence[Mapping[str, Any]]
    """processes.jsonl: the command, the versions and the first step of each process that trained; the newest one last."""
    rows: Sequence[MetricRow]
    evidence: Sequence[Mapping[str, Any]]
    held_gib: Mapping[str, float]  # GiB that the process held after step 1, by kind
    summary: Mapping[str, Any]
    exit_code: int | None  # None: status.json names no exit code
    message: str
    alive: bool | None  # whether a process trains in the folder; None for one of another host, which this host cannot see

    @property
    def name(self) -> str:
        return self.folder.name

    @cached_property
    def log_rows(self) -> list[MetricRow]:
        return [row for row in self.rows if "learning_rate" in row]

    @cached_property
    def evaluations(self) -> list[MetricRow]:
        return [row for row in self.rows if any(key.startswith("eval_") for key in row)]

    @property
    def last(self) -> Mapping[str, Any]:
        """The newest entry of `processes`; {} if there is none."""
        return self.processes[-1] if self.processes else {}

    @property
    def step(self) -> int:
        """The last step that a row has."""
        return max((int(row["step"] or 0) for row in self.rows), default=0)

    @property
    def total_steps(self) -> int | None:
        return self.last.get("total_steps")

    @property
    def complete(self) -> bool:
        return self.exit_code == 0

    @property
    def lost(self) -> bool:
        """Whether the process ended without writing its exit code."""
        return self.exit_code is None and self.alive is False

    @property
    def state(self) -> str:
        """How the run ended, or how far it is, in words."""
        of = f" of {self.total_steps:,}" if self.total_steps else ""
        progress = f"step {self.step:,}{of}"
        if self.complete:
            return f"done, {counted(self.step, 'step')}"
        if self.exit_code is not None:
            return f"exit code {self.exit_code} at {progress}"
        return f"killed at {progress}" if self.lost else f"running, {progress}"

    @cached_property
    def windows(self) -> list[Window]:
        """The log intervals whose speed counts: without the first one of each process, if there are others."""
        return windows_of(self.log_rows, [int(process["step"]) for process in self.processes])

    @property
    def seconds_per_epoch(self) -> float | None:
        """Seconds of training steps in an epoch, without evaluations and saves."""
        steps, windows = self.last.get("steps_per_epoch"), self.windows
        return steps * sum(w.seconds for w in windows) / sum(w.steps for w in windows) if steps and windows else None

    @property
    def peak_gib(self) -> float | None:
        return max(self.values("peak_memory_gib"), default=None)

    @property
    def use(self) -> Mapping[str, Any]:
        """How well the run used its device: the summary's "use"; {} for a run that is not complete."""
        found: Mapping[str, Any] = self.summary.get("use", {})
        return found

    @property
    def gpu_use(self) -> float | None:
        found = self.use.get("gpu_percent")
        return mean(self.values("gpu_utilization")) if found is None else float(found)

    @property
    def data_wait(self) -> float | None:
        """The part of the training in which the loop waited for data."""
        return mean(self.values("data_wait"))

    def values(self, key: str) -> list[float]:
        """The finite values of `key` at the log points."""
        return [value for row in self.log_rows if (value := row.get(key)) is not None and math.isfinite(value)]

    def metric_names(self) -> list[str]:
        """The metrics of the evaluations, without "eval_"."""
        names = (key.removeprefix("eval_") for row in self.evaluations for key in row if key.startswith("eval_"))
        return [name for name in dict.fromkeys(names) if name not in TIMING]

    def best(self, metric: str) -> Best | None:
        """The best value of `metric` over the evaluations. The last one if the run does not say which direction is better."""
        rows = [row for row in self.evaluations if row.get(f"eval_{metric}") is not None]
        found = [Best(value_of(row, f"eval_{metric}"), int(row["step"] or 0)) for row in rows]
        greater = self.last.get("metric_directions", {}).get(metric)
        if not found or greater is None:
            return found[-1] if found else None
        return (max if greater else min)(found, key=lambda best: best.value)

    def test_metrics(self) -> dict[str, float]:
        """The metrics of the test data, without "test_"."""
        found = {key.removeprefix("test_"): value for row in self.rows for key, value in row.items() if key.startswith("test_")}
        return {name: value for name, value in found.items() if value is not None and name not in TIMING}

    def class_details(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """(title, `Metrics.details`) of the best evaluation and of the test, if the run has them."""
        for prefix, title in (("best_eval_", "Evaluation, best weights"), ("test_", "Test, best weights")):
            found = {key: self.summary.get(f"{prefix}{key}") for key in ("classes", "confusion_matrix")}
            if details := {key: value for key, value in found.items() if value is not None}:
                yield title, details


def value_of(row: MetricRow, key: str) -> float:
    """The value of `key`; NaN if it was not finite, which JSON cannot hold."""
    value = row[key]
    return math.nan if value is None else value


def mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
