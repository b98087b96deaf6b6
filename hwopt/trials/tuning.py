"""`hwopt tune`: searches the fastest setting of a plan with trials in processes of their own, and describes what it found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from types import TracebackType

from hwopt.errors import DoesNotFitError, InputError
from hwopt.export.files import write
from hwopt.planning.plan import Plan
from hwopt.records.throughput import Unit, Window, rate
from hwopt.system import signals
from hwopt.trials.processes import Launch, in_new_process, launcher_for
from hwopt.trials.search import TRIALS, Ending, Failure, Measurement, Search, Setting, Trial
from hwopt.trials.space import Space
from hwopt.trials.trial import Outcome, Variant, run_trial
from hwopt.trials.tune_rows import TrialRow, TuneListener, TuneResult, rate_text, ratio_text
from hwopt.trials.tuned_profile import Parent, Tuned, profile_text

FAILURES: dict[str, Failure] = {"out of memory": "out of memory", "timed out": "time limit"}
"""Ending of a trial -> failure; "crash" for the others."""
ENDINGS: dict[Ending, str] = {
    "plateau": "no other change is expected to be faster",
    "limit": "all trials are used",
    "interrupted": "interrupted",
}
COMPILES = 5.0
"""A step that computes for so many times the median compiles something."""


@dataclass(frozen=True)
class TuneEffort:
    """What a search may take."""

    trials: int = TRIALS
    steps: int = 40
    time_limit_s: float = 600.0


@dataclass
class Tuning(AbstractContextManager["Tuning"]):
    """A search with trials of a job. A context: its temporary files and its processes end with it."""

    space: Space
    job: Path | None
    start: Variant
    effort: TuneEffort = field(default_factory=TuneEffort)
    progress: TuneListener = field(default_factory=TuneListener)
    outcomes: list[Outcome] = field(default_factory=list)
    """Of the trials, in order."""
    ending: Ending = "plateau"
    file: Path | None = None
    job_sets: Sequence[str] = ()

    def __post_init__(self) -> None:
        self.search = Search(self.space.axes, self.space.forecast, self.measure, self.effort.trials, self.report)
        self.stack = ExitStack()
        self.launch: Launch = in_new_process
        self.folder = Path()

    def __enter__(self) -> Tuning:
        self.folder = Path(self.stack.enter_context(TemporaryDirectory(prefix="hwopt-tune-", ignore_cleanup_errors=True)))
        self.launch = self.stack.enter_context(launcher_for(self.space.start.hardware.device_type)())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stack.close()

    # searching

    def run(self) -> int:
        """Search until the plateau, the last trial, or a signal; returns the exit code.

        Raises DoesNotFitError if the start does not fit into memory, InputError if its trial fails otherwise.
        """
        self.require_fit()
        try:
            self.ending = self.search.run()
        except (KeyboardInterrupt, SystemExit) as error:
            if not self.search.trials:
                raise
            self.ending = "interrupted"
            return signals.exit_code(error)
        self.require_start()
        return 0

    def require_fit(self) -> None:
        """Raise DoesNotFitError if the planner says that the start does not fit."""
        self.progress.on_planning("the start")
        memory = self.space.memory_of(self.search.start)
        if memory is not None and memory.fits is False:
            usable = memory.free_gib - memory.reserve_gib
            raise DoesNotFitError(
                f"The profile does not fit: it needs {memory.highest_gib:.2f} GiB, {usable:.2f} GiB are usable. "
                "`hwopt plan` shows the options that save memory"
            )

    def require_start(self) -> None:
        """Raise the error of the first trial if it failed."""
        first = self.rows[0]
        if not first.failure:
            return
        error = DoesNotFitError if first.failure == "out of memory" else InputError
        longer = ". Give it more with --time-limit" if first.failure == "time limit" else ""
        raise error(f"The first trial, with the profile as it is, failed: {first.outcome}{longer}")

    @property
    def unit(self) -> Unit:
        return "tokens" if self.space.start.context.task.inputs == "tokens" else "samples"

    def measure(self, setting: Setting) -> Measurement:
        """Train with `setting` for some steps in a process of its own."""
        number = len(self.outcomes) + 1
        self.progress.on_begin(number, self.effort.trials, self.space.described(setting))
        start = self.start
        assignments = (*start.assignments, *self.space.assignments(setting))
        variant = Variant(f"trial {number}", start.profile, assignments, start.memory_limit)
        folder = self.folder / str(number)
        outcome = run_trial(self.job, variant, self.effort.steps, folder, self.effort.time_limit_s, self.launch)
        self.outcomes.append(outcome)
        return measurement_of(outcome, self.unit)

    def report(self, trial: Trial) -> None:
        self.progress.on_trial(self.row(trial))

    # what was found

    def row(self, trial: Trial) -> TrialRow:
        outcome, measurement = self.outcomes[trial.number - 1], trial.measurement
        return TrialRow(
            trial.number,
            self.space.described(trial.setting),
            self.space.assignments(trial.setting),
            rate(measurement.windows, self.unit),
            self.unit,
            outcome.peak_gib,
            trial.ratio,
            measurement.failure or "",
            outcome.message,
        )

    @property
    def rows(self) -> list[TrialRow]:
        return [self.row(trial) for trial in self.search.trials]

    @property
    def improved(self) -> bool:
        return self.search.best != self.search.start

    def result(self) -> TuneResult:
        return TuneResult(self.rows, self.row(self.search.winner), ENDINGS[self.ending], self.file, self.job_sets)

    def write(self, path: Path, parent: Parent, assignments: Sequence[str], force: bool) -> None:
        """Write the profile. `assignments`: those of `--set` that all trials had."""
        tables = self.space.tables(self.search.best)
        tuned = Tuned(tables, {name: self.comment_on(name) for name in tables}, self.header(parent.label))
        write(path, profile_text(path, parent, tuned, assignments), force)
        self.file = path

    def check(self, written: Plan) -> None:
        """Note the options in which the plan with the written profile differs from the best setting: the job sets them."""
        best = self.space.plan(self.search.best)
        assert best is not None, "it was measured"
        self.job_sets = different_options(best, written)

    def comment_on(self, plugin: str) -> str:
        """What the trials say of the options of `plugin` in the best setting."""
        own = [number for number, dimension in enumerate(self.space.dimensions) if dimension.plugin == plugin]
        best = self.search.best
        first = next(trial for trial in self.search.good if all(trial.setting[number] == best[number] for number in own))
        return f"trial {first.number}: {ratio_text(first.ratio)} times the speed of the start"

    def header(self, parent: str) -> list[str]:
        """The comments at the top of the profile."""
        plan, effort, rows = self.space.start, self.effort, self.rows
        software = ", ".join(f"{name} {plan.software[name]}" for name in ("torch", "transformers") if name in plan.software)
        return [
            f"{parent}, tuned by hwopt {version('hwopt')} on {date.today()} on {plan.hardware.name}, with {software}.",
            f"Job: {plan.job_name}, {plan.model.architecture}, {plan.batch.step} rows per optimizer step, as before.",
            f"{len(rows)} trials of {effort.steps} steps; {ENDINGS[self.ending]}.",
            "Trial, its speed if that of the start is 1 (95 % interval), peak memory, setting:",
            *(f"  {line(row)}" for row in rows),
        ]


def line(row: TrialRow) -> str:
    """A trial on one line."""
    if row.failure:
        return f"{row.number}  {row.failure}  {row.setting}"
    speed = f"1 = {rate_text(row.rate or 0.0)} {row.unit}/s" if row.number == 1 else ratio_text(row.ratio)
    memory = "-" if row.peak_gib is None else f"{row.peak_gib:.2f} GiB"
    return f"{row.number}  {speed}  {memory}  {row.setting}"


def measurement_of(outcome: Outcome, unit: Unit) -> Measurement:
    """What the search needs of an outcome. Micro-batches that the out-of-memory back-off made smaller did not fit."""
    if not outcome.completed or not outcome.windows:
        return Measurement(failure=FAILURES.get(outcome.ending, "crash"))
    if outcome.reduced_rows is not None:
        return Measurement(failure="out of memory")
    waits = outcome.data_waits
    windows = without_compilation(outcome.windows, waits)
    seconds = sum(window.seconds for window in windows)
    waited = sum(waits.get(window.step, 0.0) * window.seconds for window in windows)
    return Measurement(tuple(windows), waited / seconds, unit=unit)


def without_compilation(windows: Sequence[Window], waits: Mapping[int, float]) -> list[Window]:
    """`windows` without the steps that took far longer than the median, for their tokens, and did not wait for data.

    A compiled model compiles again for each new width, which a long run does not notice.
    """
    computed = [window.seconds * (1 - waits.get(window.step, 0.0)) / (window.tokens or window.samples) for window in windows]
    usual = median(computed)
    return [window for window, seconds in zip(windows, computed, strict=True) if seconds <= COMPILES * usual]


def different_options(best: Plan, written: Plan) -> list[str]:
    """The plugin options in which two plans differ, as `--set` spells them."""
    ours, theirs = ({entry.name: entry.options.model_dump(mode="json") for entry in plan.applied()} for plan in (best, written))
    found = []
    for name in {**ours, **theirs}:
        mine, other = ours.get(name), theirs.get(name)
        if mine is None or other is None:
            found.append(f"plugins.{name}")
        else:
            found += [f"plugins.{name}.{key}" for key in mine if mine[key] != other.get(key)]
    return found
