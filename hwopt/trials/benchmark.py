"""Benchmark: measures the variants of a bench in rounds, and makes the rows of its table.

The first round trains a few steps of each variant without dropout: it compares the losses, finds variants that fail, fills
caches, and shows how many rows take the wanted time. Later rounds leave out variants that are clear and those that failed.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from hwopt.planning.plan import Plan
from hwopt.trials.bench_rows import BenchRow
from hwopt.trials.processes import Launch
from hwopt.trials.rounds import Speedup, parity, rotated, speedup, steps_for
from hwopt.trials.trial import Outcome, run_trial
from hwopt.trials.variants import BASELINE, COPY, PlannedVariant, effect_between, loss_obstacle

FIRST_STEPS = 8
"""Steps of the first round: the losses of later steps drift apart by rounding alone."""
LEAST_STEPS = 12
"""Steps of a later trial, at least: the first and the last one are under the profiler, and a fifth warms up."""


@dataclass(frozen=True)
class BenchEffort:
    """How long a bench measures."""

    rounds: int = 5
    seconds: float = 3.0
    """Training of the baseline in a trial; the other variants train as many rows."""
    steps: int | None = None
    """Steps of the variant with the most rows per step, instead of `seconds`."""
    limit_s: float = 600.0
    """After so many seconds a trial is killed."""


class BenchListener:
    """Hears what is measured next. Does nothing by default."""

    def on_plan(self, name: str) -> None:
        """The variant `name` is planned."""

    def on_round(self, number: int, rounds: int) -> None:
        """Round `number` begins; 0 is the round without dropout."""

    def on_trial(self, name: str, number: int, rounds: int, seconds_left: float | None) -> None:
        """The trial of the variant `name` begins. `seconds_left`: an estimate for the rest of the bench."""


class Benchmark:
    """The measurements of a bench. `run` may be interrupted: what is measured by then stays."""

    def __init__(
        self,
        job: Path | None,
        candidates: Sequence[PlannedVariant],
        effort: BenchEffort,
        folder: Path,
        launcher: Callable[[], AbstractContextManager[Launch]],
        progress: BenchListener,
    ) -> None:
        self.job, self.effort, self.folder = job, effort, folder
        self.candidates = {candidate.name: candidate for candidate in candidates}
        self.launcher, self.progress = launcher, progress
        self.first: dict[str, Outcome] = {}
        """The outcomes of the first round, without dropout."""
        self.measured: dict[str, dict[int, Outcome]] = {name: {} for name in self.candidates}
        """The completed trials of the later rounds, by variant and number of the round."""
        self.failed: dict[str, Outcome] = {}
        self.trial_seconds: list[float] = []

    def run(self) -> None:
        """Measure until every variant is clear or has all rounds."""
        for number in range(self.effort.rounds + 1):
            names = self.unfinished()
            if not names:
                return
            self.progress.on_round(number, self.effort.rounds)
            with self.launcher() as launch:
                for place, name in enumerate(rotated(names, number)):
                    left = (len(names) - place) + len(names) * (self.effort.rounds - number)
                    self.progress.on_trial(name, number, self.effort.rounds, self.estimate(left))
                    self.measure(name, number, launch)

    def estimate(self, trials: int) -> float | None:
        """Seconds that `trials` trials take; None before there is one."""
        return median(self.trial_seconds[-8:]) * trials if self.trial_seconds else None

    def measure(self, name: str, number: int, launch: Launch) -> None:
        """Run one trial of the variant `name`."""
        candidate, folder = self.candidates[name], self.folder / f"{number}-{len(self.trial_seconds)}"
        variant = replace(candidate.variant, without_dropout=number == 0)
        steps = FIRST_STEPS if number == 0 else self.steps_of(candidate)
        began = time.monotonic()
        try:
            outcome = run_trial(self.job, variant, steps, folder, self.effort.limit_s, launch)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        self.trial_seconds.append(time.monotonic() - began)
        if not outcome.completed:
            self.failed[name] = outcome
        elif number == 0:
            self.first[name] = outcome
        else:
            self.measured[name][number] = outcome

    def steps_of(self, candidate: PlannedVariant) -> int:
        """The steps of a trial: every variant trains about as many rows."""
        assert candidate.plan is not None
        step = candidate.plan.batch.step
        if self.effort.steps is not None:
            most = max(each.plan.batch.step for each in self.candidates.values() if each.plan is not None)
            return steps_for(self.effort.steps * most, step, self.effort.steps)
        known = self.first.get(BASELINE) or next(iter(self.first.values()), None)
        speed = (known.rate("samples") if known is not None else None) or 0.0
        return steps_for(int(self.effort.seconds * speed), step, LEAST_STEPS)

    def unfinished(self) -> list[str]:
        """The variants that the next round measures: those that are not clear, and their references."""
        running = [name for name, candidate in self.candidates.items() if candidate.runs and name not in self.failed]
        open_ = [name for name in running if name not in (BASELINE, COPY) and not ((found := self.speedup(name)) and found.clear)]
        needed = {self.candidates[name].reference for name in open_} | ({BASELINE, COPY} if open_ else set())
        return [name for name in running if name in open_ or name in needed]

    def speedup(self, name: str) -> Speedup | None:
        """The speed of a variant over that of its reference."""
        reference = self.candidates[name].reference
        if reference not in self.candidates:
            return None
        floor = None if name == COPY else self.speedup(COPY)
        return speedup(self.speeds(name), self.speeds(reference), floor)

    def speeds(self, name: str) -> dict[int, float]:
        """Round -> samples per second."""
        found = {number: outcome.rate("samples") for number, outcome in self.measured[name].items()}
        return {number: speed for number, speed in found.items() if speed}

    def rows(self) -> list[BenchRow]:
        """The rows of the table, in the order of the candidates."""
        return [self.row(candidate) for candidate in self.candidates.values()]

    def row(self, candidate: PlannedVariant) -> BenchRow:
        name = candidate.name
        outcomes = list(self.measured[name].values())

        def middle(values: Iterable[float | None]) -> float | None:
            """The median of the values that are known. 0 is not, as with the tokens of images."""
            return median(known) if (known := [value for value in values if value]) else None

        loss, agrees = self.loss_of(candidate)
        ending, note = self.ending_of(candidate)
        return BenchRow(
            name=name,
            role=candidate.role,
            reference=candidate.reference,
            rounds=len(outcomes),
            rows_per_step=None if candidate.plan is None else candidate.plan.batch.step,
            seconds_per_step=middle(outcome.seconds_per_step for outcome in outcomes),
            seconds_per_epoch=middle(outcome.seconds_per_epoch for outcome in outcomes),
            samples_per_second=middle(outcome.rate("samples") for outcome in outcomes),
            tokens_per_second=middle(outcome.rate("tokens") for outcome in outcomes),
            peak_gib=max((outcome.peak_gib for outcome in outcomes if outcome.peak_gib is not None), default=None),
            speedup=self.speedup(name),
            loss=loss,
            loss_agrees=agrees,
            ending=ending,
            note=note,
        )

    def loss_of(self, candidate: PlannedVariant) -> tuple[str, bool | None]:
        """The losses of a variant against those of its reference, in words, and whether they agree."""
        reference = self.candidates.get(candidate.reference)
        own, other = self.first.get(candidate.name), self.first.get(candidate.reference)
        if reference is None or own is None or other is None or candidate.plan is None or reference.plan is None:
            return "", None
        if obstacle := loss_obstacle(candidate.plan, reference.plan):
            return f"not compared: {obstacle}", None
        return parity(effect_between(candidate.plan, reference.plan), own.losses, other.losses)

    def ending_of(self, candidate: PlannedVariant) -> tuple[str, str]:
        """How the variant ended, and what to say of it."""
        if not candidate.runs:
            return candidate.ending, candidate.note
        if (failure := self.failed.get(candidate.name)) is not None:
            return failure.ending, failure.message
        outcomes = [*self.measured[candidate.name].values(), *filter(None, [self.first.get(candidate.name)])]
        if not outcomes:
            return "not measured", ""
        return "completed", "; ".join(dict.fromkeys(row_remarks(candidate.plan, outcomes)))


def row_remarks(plan: Plan | None, outcomes: Sequence[Outcome]) -> Iterator[str]:
    """What a reader must know of completed trials: plugins that are not active, and smaller micro-batches."""
    yield from (f"evidence: {seen}" for seen in outcomes[0].not_active)
    for outcome in outcomes:
        if outcome.reduced_rows is not None and plan is not None:
            yield f"{plan.batch.train} rows ran out of memory: measured with micro-batches of {outcome.reduced_rows}"
