"""`hwopt tune`: searches the fastest setting of a plan with trials in processes of their own, and writes it as a profile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from hwopt.errors import DoesNotFitError, InputError
from hwopt.memory.planned import resolve
from hwopt.planning.inputs import Inputs
from hwopt.planning.plan import Plan
from hwopt.records.throughput import RateRatio, Unit, Window, rate
from hwopt.system import signals
from hwopt.system.cache import cache_folder
from hwopt.system.paths import write_text
from hwopt.text import cut
from hwopt.trials.search import TRIALS, Ending, Failure, Measurement, Search, Setting, Trial
from hwopt.trials.space import Space
from hwopt.trials.trial import Launch, Outcome, TrialProgress, Variant, launching, run_trial
from hwopt.trials.tuned_profile import Parent, Tuned, job_assignments, output_file, tuned_profile_text

FAILURES: dict[str, Failure] = {"out of memory": "out of memory", "timed out": "time limit"}
"""Ending of a trial -> failure; "crash" for the others."""
ENDINGS: dict[Ending, str] = {
    "plateau": "no other change is expected to be faster",
    "limit": "all trials are used",
    "interrupted": "interrupted",
}
COMPILES = 5.0  # a step that computes for so many times the median compiles something


@dataclass(frozen=True)
class TuneEffort:
    """What a search may take."""

    trials: int = TRIALS
    steps: int = 40
    time_limit_s: float = 600.0


@dataclass(frozen=True)
class TrialRow:
    """A trial, as reports show it."""

    number: int
    setting: str  # what it changes
    assignments: tuple[str, ...]  # the same as arguments of `--set`
    rate: float | None  # units per second; None for a failure
    unit: Unit
    peak_gib: float | None
    ratio: RateRatio | None  # of its speed to that of the start
    failure: str = ""
    message: str = ""

    @property
    def outcome(self) -> str:
        """How it failed, in one line."""
        lines = self.message.strip().splitlines()
        return f"{self.failure}: {cut(lines[0], 160)}" if lines else self.failure


@dataclass(frozen=True)
class TuneResult:
    rows: Sequence[TrialRow]
    best: TrialRow
    ending: str
    file: Path | None = None  # the profile that was written; None if the start is the best setting
    job_sets: Sequence[str] = ()
    """Options of the best setting that the job sets otherwise, so that the profile does not count."""

    def to_dict(self) -> dict[str, Any]:
        """What `hwopt tune --format json` prints."""
        found = asdict(self) | {"file": None if self.file is None else str(self.file)}
        return {"trials": found.pop("rows"), "best": found.pop("best"), "ended": found.pop("ending"), **found}


def rate_text(rate: float) -> str:
    """`rate` with three digits at least."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def ratio_text(ratio: RateRatio | None) -> str:
    """The ratio with its 95 % interval."""
    if ratio is None or ratio.low is None or ratio.high is None:
        return "-" if ratio is None else f"{ratio.value:.2f}"
    return f"{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"


def tuned(
    profile: str,
    inputs: Inputs,
    effort: TuneEffort,
    progress: TrialProgress,
    on_trial: Callable[[TrialRow], None],
    output: Path | None = None,
    force: bool = False,
    *,
    job: Path | None,
    assignments: Sequence[str],
    memory_limit: str | None = None,
    strict: bool = False,
) -> tuple[TuneResult, int]:
    """What a search for `profile` found, and the exit code. A faster setting is written to `output`, or beside the job.

    Raises DoesNotFitError if the profile does not fit into memory, InputError if its trial fails otherwise.
    """

    def resolved(changes: Sequence[str] = ()) -> Plan:
        given = [*assignments, *changes]
        return resolve(profile, job, assignments=given, strict=strict, memory_limit=memory_limit, inputs=inputs)

    start = resolved()
    parent = Parent.of(profile, start.profile, inputs.files)
    path = output_file(output, parent, job, force)
    space = Space(start, inputs.registry, resolved, cache_folder(), lambda what: progress.show(f"planning: {what}"))
    with (
        TemporaryDirectory(prefix="hwopt-tune-", ignore_cleanup_errors=True) as folder,
        launching(start.hardware.device_type) as launch,
    ):
        variant = Variant("start", profile, tuple(assignments), memory_limit)
        tuning = Tuning(space, job, variant, effort, progress, on_trial, Path(folder), launch)
        code = tuning.run()
    rows, best = [tuning.row(trial) for trial in tuning.search.trials], tuning.row(tuning.search.winner)
    if best.number == 1:
        return TuneResult(rows, best, ENDINGS[tuning.ending]), code
    write_text(path, tuned_profile_text(path, parent, tuning.found(parent.label), assignments), new=not force)
    written = resolve(str(path), job, assignments=job_assignments(assignments), memory_limit=memory_limit)
    measured = space.plan(tuning.search.best)
    assert measured is not None, "it was measured"
    return TuneResult(rows, best, ENDINGS[tuning.ending], path, different_options(measured, written)), code


@dataclass
class Tuning:
    """A search with trials of a job."""

    space: Space
    job: Path | None
    start: Variant
    effort: TuneEffort
    progress: TrialProgress
    on_trial: Callable[[TrialRow], None]
    folder: Path
    launch: Launch
    ending: Ending = "plateau"
    search: Search = field(init=False)

    def __post_init__(self) -> None:
        self.search = Search(self.space.axes, self.space.forecast, self.measure, self.effort.trials)
        self.search.on_trial = lambda trial: self.on_trial(self.row(trial))

    def run(self) -> int:
        """Search until the plateau, the last trial, or a signal; returns the exit code.

        Raises DoesNotFitError if the planner says that the start does not fit, and the error of the first trial if it failed.
        """
        self.progress.show("planning: the start")
        memory = self.space.memory_of(self.search.start)
        if memory is not None and memory.fits is False:
            usable = memory.free_gib - memory.reserve_gib
            raise DoesNotFitError(
                f"The profile does not fit: it needs {memory.highest_gib:.2f} GiB, {usable:.2f} GiB are usable. "
                "`hwopt plan` shows the options that save memory"
            )
        try:
            self.ending = self.search.run()
        except (KeyboardInterrupt, SystemExit) as error:
            if not self.search.trials:
                raise
            self.ending = "interrupted"
            return signals.exit_code(error)
        first = self.row(self.search.trials[0])
        if first.failure:
            failed = DoesNotFitError if first.failure == "out of memory" else InputError
            longer = ". Give it more with --time-limit" if first.failure == "time limit" else ""
            raise failed(f"The first trial, with the profile as it is, failed: {first.outcome}{longer}")
        return 0

    @property
    def unit(self) -> Unit:
        return "tokens" if self.space.start.context.task.inputs == "tokens" else "samples"

    def measure(self, setting: Setting) -> Measurement:
        number = len(self.search.trials) + 1
        self.progress.show(f"trial {number} of at most {self.effort.trials}: {self.space.described(setting)}")
        variant = replace(self.start, assignments=(*self.start.assignments, *self.space.assignments(setting)))
        folder = self.folder / str(number)
        outcome = run_trial(self.job, variant, self.effort.steps, folder, self.effort.time_limit_s, self.launch)
        return measurement_of(outcome, self.unit)

    def row(self, trial: Trial) -> TrialRow:
        found, setting = trial.measurement, (self.space.described(trial.setting), self.space.assignments(trial.setting))
        speed = rate(found.windows, self.unit)
        return TrialRow(trial.number, *setting, speed, self.unit, found.peak_gib, trial.ratio, found.failure or "", found.message)

    def found(self, parent: str) -> Tuned:
        """The options of the best setting, with what the trials say of them."""
        tables = self.space.tables(self.search.best)
        skipped = frozenset(entry.name for entry in self.space.start.entries if entry.decision == "skip")
        return Tuned(tables, {name: self.comment_on(name) for name in tables}, list(self.header(parent)), skipped)

    def comment_on(self, plugin: str) -> str:
        """What the trials say of the options of `plugin` in the best setting."""
        own = [number for number, dimension in enumerate(self.space.dimensions) if dimension.plugin == plugin]
        best = self.search.best
        first = next(trial for trial in self.search.good if all(trial.setting[number] == best[number] for number in own))
        return f"trial {first.number}: {ratio_text(first.ratio)} times the speed of the start"

    def header(self, parent: str) -> Iterator[str]:
        plan, trials = self.space.start, self.search.trials
        software = ", ".join(f"{name} {plan.software[name]}" for name in ("torch", "transformers") if name in plan.software)
        yield f"{parent}, tuned by hwopt {version('hwopt')} on {date.today()} on {plan.hardware.name}, with {software}."
        yield f"Job: {plan.job_name}, {plan.model.architecture}, {plan.batch.step} rows per optimizer step, as before."
        yield f"{len(trials)} trials of {self.effort.steps} steps; {ENDINGS[self.ending]}."
        yield "Trial, its speed if that of the start is 1 (95 % interval), peak memory, setting:"
        for row in map(self.row, trials):
            if row.failure:
                yield f"  {row.number}  {row.failure}  {row.setting}"
                continue
            speed = f"1 = {rate_text(row.rate or 0.0)} {row.unit}/s" if row.number == 1 else ratio_text(row.ratio)
            memory = "-" if row.peak_gib is None else f"{row.peak_gib:.2f} GiB"
            yield f"  {row.number}  {speed}  {memory}  {row.setting}"


def measurement_of(outcome: Outcome, unit: Unit) -> Measurement:
    """What the search needs of an outcome. Micro-batches that the out-of-memory back-off made smaller did not fit."""
    if not outcome.completed or not outcome.windows:
        return Measurement(failure=FAILURES.get(outcome.ending, "crash"), message=outcome.message)
    if outcome.reduced_rows is not None:
        return Measurement(failure="out of memory", message=f"only {outcome.reduced_rows} rows fit")
    waits = outcome.data_waits
    windows = without_compilation(outcome.windows, waits)
    seconds = sum(window.seconds for window in windows)
    waited = sum(waits.get(window.step, 0.0) * window.seconds for window in windows)
    return Measurement(tuple(windows), waited / seconds, unit=unit, peak_gib=outcome.peak_gib)


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
    found = [f"plugins.{name}" for name in ours.keys() ^ theirs.keys()]
    for name in ours.keys() & theirs.keys():
        found += [f"plugins.{name}.{key}" for key, value in ours[name].items() if value != theirs[name][key]]
    return sorted(found)
