"""Benchmark: measures the variants of a bench in rounds, and makes the rows of its table.

The first round trains a few steps of each variant without dropout: it compares the losses, finds variants that fail, fills
caches, and shows how many rows take the wanted time. Later rounds leave out variants that are clear and those that failed.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

from hwopt.trials.rounds import Speedup, parity, speedup
from hwopt.trials.trial import Launch, Outcome, TrialProgress, run_trial
from hwopt.trials.variants import BASELINE, COPY, PlannedVariant, Role, effect_between, loss_obstacle

FIRST_STEPS = 8  # steps of the first round: the losses of later steps drift apart by rounding alone
LEAST_STEPS = 12  # steps of a later trial, at least: the first and the last one are under the profiler, and a fifth warms up


@dataclass(frozen=True)
class BenchEffort:
    """How long a bench measures."""

    rounds: int = 5
    seconds: float = 3.0  # training of the baseline in a trial; the other variants train as many rows
    steps: int | None = None  # steps of the variant with the most rows per step, instead of `seconds`
    limit_s: float = 600.0  # after so many seconds a trial is killed


@dataclass(frozen=True)
class BenchRow:
    """A variant. Figures are medians of the rounds; None: not measured."""

    name: str
    role: Role
    reference: str = ""  # the variant that its speed is compared with
    rounds: int = 0
    rows_per_step: int | None = None
    seconds_per_step: float | None = None
    seconds_per_epoch: float | None = None
    samples_per_second: float | None = None
    tokens_per_second: float | None = None  # real tokens, without padding
    peak_gib: float | None = None
    speedup: Speedup | None = None
    loss: str = ""  # the losses, compared with those of the reference
    loss_agrees: bool | None = None
    """Whether they agree as far as the plugin promises; None: not compared, or it promises nothing."""
    ending: str = "completed"  # completed, not applied here, does not fit, or how its trial failed
    note: str = ""  # why it was not measured, and what else there is to say


@dataclass(frozen=True)
class Bench:
    """A bench as reports show it. `facts`: job, profile, baseline, machine, versions, date."""

    rows: Sequence[BenchRow]
    facts: Mapping[str, str]
    memory_kind: str = ""
    notes: Sequence[str] = ()

    def row(self, role: Role) -> BenchRow | None:
        """The first row with this role."""
        return next((row for row in self.rows if row.role == role), None)

    def to_dict(self) -> dict[str, Any]:
        """What `hwopt bench --format json` prints."""
        found = {"facts": dict(self.facts), "memory_kind": self.memory_kind, "notes": list(self.notes)}
        return found | {"variants": [asdict(row) for row in self.rows]}


class Benchmark:
    """The measurements of a bench. `run` may be interrupted: what is measured by then stays."""

    def __init__(
        self,
        job: Path | None,
        candidates: Sequence[PlannedVariant],
        effort: BenchEffort,
        folder: Path,
        launcher: Callable[[], AbstractContextManager[Launch]],
        progress: TrialProgress,
    ) -> None:
        self.job, self.effort, self.folder = job, effort, folder
        self.candidates = {candidate.name: candidate for candidate in candidates}
        self.launcher, self.progress = launcher, progress
        self.first: dict[str, Outcome] = {}  # the outcomes of the first round, without dropout
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
            what = f"round {number} of {self.effort.rounds}" if number else "comparing losses without dropout"
            self.progress.announce(what)
            start = number % len(names)  # each variant is measured at each place
            with self.launcher() as launch:
                for place, name in enumerate([*names[start:], *names[:start]]):
                    left = (len(names) - place) + len(names) * (self.effort.rounds - number)
                    self.progress.show(f"{what}: {name}{self.time_left(left)}")
                    self.measure(name, number, launch)

    def time_left(self, trials: int) -> str:
        """What `trials` trials take at most, in words; "" before there is one."""
        if not self.trial_seconds:
            return ""
        seconds = median(self.trial_seconds[-8:]) * trials
        return f", at most {f'{seconds:.0f} s' if seconds < 120 else f'{seconds / 60:.0f} min'} left"

    def measure(self, name: str, number: int, launch: Launch) -> None:
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
            return ceil(self.effort.steps * most / step)
        known = self.first.get(BASELINE) or next(iter(self.first.values()), None)
        speed = (known.rate("samples") if known is not None else None) or 0.0
        return max(LEAST_STEPS, ceil(int(self.effort.seconds * speed) / step))

    def unfinished(self) -> list[str]:
        """The variants that the next round measures: those that are not clear, and their references."""
        running = [name for name, candidate in self.candidates.items() if candidate.runs and name not in self.failed]
        open_ = [name for name in running if name not in (BASELINE, COPY) and not ((found := self.speedup(name)) and found.clear)]
        needed = {self.candidates[name].reference for name in open_} | ({BASELINE, COPY} if open_ else set())
        return [name for name in running if name in open_ or name in needed]

    def speedup(self, name: str) -> Speedup | None:
        reference = self.candidates[name].reference
        if reference not in self.candidates:
            return None
        floor = None if name == COPY else self.speedup(COPY)
        return speedup(self.speeds(name), self.speeds(reference), floor)

    def speeds(self, name: str) -> dict[int, float]:
        """Round -> samples per second."""
        return {number: speed for number, outcome in self.measured[name].items() if (speed := outcome.rate("samples"))}

    def rows(self) -> list[BenchRow]:
        return list(map(self.row, self.candidates.values()))

    def row(self, candidate: PlannedVariant) -> BenchRow:
        name = candidate.name
        outcomes = list(self.measured[name].values())

        def middle(values: Iterable[float | None]) -> float | None:
            """The median of the values that are known. 0 is not, as with the tokens of images."""
            return median(known) if (known := [value for value in values if value]) else None

        loss, agrees = self.loss_of(candidate)
        ending, note = self.ending_of(candidate)
        return BenchRow(
            name,
            candidate.role,
            candidate.reference,
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
        own, other = self.first.get(candidate.name), self.first.get(candidate.reference)
        if own is None or other is None:
            return "", None
        ours, theirs = candidate.plan, self.candidates[candidate.reference].plan
        assert ours is not None
        assert theirs is not None
        if obstacle := loss_obstacle(ours, theirs):
            return f"not compared: {obstacle}", None
        return parity(effect_between(ours, theirs), own.losses, other.losses)

    def ending_of(self, candidate: PlannedVariant) -> tuple[str, str]:
        if not candidate.runs:
            return candidate.ending, candidate.note
        if (failure := self.failed.get(candidate.name)) is not None:
            return failure.ending, failure.message
        outcomes = [*self.measured[candidate.name].values(), *filter(None, [self.first.get(candidate.name)])]
        if not outcomes:
            return "not measured", ""
        assert candidate.plan is not None
        remarks = [f"evidence: {seen}" for seen in outcomes[0].not_active]
        reduced = [outcome.reduced_rows for outcome in outcomes if outcome.reduced_rows is not None]
        tried = f"{candidate.plan.batch.train} rows ran out of memory: measured with micro-batches of"
        return "completed", "; ".join(dict.fromkeys([*remarks, *(f"{tried} {rows}" for rows in reduced)]))
