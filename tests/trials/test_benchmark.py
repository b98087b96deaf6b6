"""Benchmark: which trials it runs in which order, when it stops, and the rows of its table. No process is started."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hwopt.planning.inputs import Inputs
from hwopt.planning.plan import Plan
from hwopt.records.throughput import Window
from hwopt.testing import plan_for, tiny_job
from hwopt.trials import benchmark
from hwopt.trials.benchmark import FIRST_STEPS, LEAST_STEPS, BenchEffort, Benchmark, BenchRow
from hwopt.trials.trial import Launch, Outcome, Variant
from hwopt.trials.variants import BASELINE, COPY, PlannedVariant

PROFILE = "mine.toml"


@dataclass
class Machine:
    """Trains at the speeds that a test gives, with noise; remembers the trials."""

    speeds: Mapping[str, float]
    """Variant -> samples per second."""
    noise: float = 0.0
    failing: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    losses: Mapping[str, Sequence[float]] = field(default_factory=dict)
    trials: list[tuple[str, int, bool]] = field(default_factory=list)
    """(variant, steps, without dropout)."""
    stop_after: int = 10_000

    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.draw = random.Random(0)

    def show(self, text: str) -> None:
        self.said.append(text)

    announce = show

    def run_trial(self, job: Path | None, variant: Variant, steps: int, folder: Path, limit_s: float, launch: Launch) -> Outcome:
        if len(self.trials) == self.stop_after:
            raise KeyboardInterrupt
        self.trials.append((variant.name, steps, variant.without_dropout))
        if variant.name in self.failing:
            ending, message = self.failing[variant.name]
            return Outcome(ending, message)
        speed = self.speeds[variant.name] * (1 + self.noise * self.draw.uniform(-1, 1))
        losses = dict(enumerate(self.losses.get(variant.name, (2.0, 1.0)), 1))
        return Outcome("completed", windows=[Window(2, 1, 8 / speed, 8, 80)], losses=losses, steps_per_epoch=10, peak_gib=1.5)


@contextmanager
def no_process() -> Iterator[Launch]:
    yield lambda folder, limit_s: 0


@pytest.fixture
def plan(tmp_path: Path) -> Callable[..., Plan]:
    inputs, job = Inputs(), tiny_job(tmp_path / "data")
    (tmp_path / PROFILE).write_text('name = "mine"\n')

    def planned(*assignments: str) -> Plan:
        return plan_for(inputs.profile(str(tmp_path / PROFILE), assignments), job)

    return planned


OPTIMIZER, LARGER = "plugins.optimizer={name='adamw_torch_fused'}", "plugins.batch={train=16}"


@pytest.fixture
def candidates(plan: Callable[..., Plan]) -> list[PlannedVariant]:
    def candidate(name: str, role: str, reference: str, *assignments: str, **more: str) -> PlannedVariant:
        return PlannedVariant(Variant(name, PROFILE, assignments), role, reference, plan=plan(*assignments), **more)

    return [
        candidate(BASELINE, "baseline", ""),
        candidate(COPY, "copy", BASELINE),
        candidate("+ optimizer", "added", BASELINE, OPTIMIZER),
        candidate("+ tf32", "added", BASELINE, ending="not applied here", note="no card"),
        candidate("profile", "profile", BASELINE, OPTIMIZER, LARGER),
        candidate("- optimizer", "left out", "profile", LARGER),
    ]


Measure = Callable[..., dict[str, BenchRow]]


@pytest.fixture
def measure(candidates: list[PlannedVariant], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Measure:
    """The rows of a bench of `candidates` on a machine."""

    def rows(machine: Machine, **effort: Any) -> dict[str, BenchRow]:
        monkeypatch.setattr(benchmark, "run_trial", machine.run_trial)
        made = Benchmark(None, candidates, BenchEffort(**effort), tmp_path, no_process, machine)
        try:
            made.run()
        except KeyboardInterrupt:
            assert len(machine.trials) == machine.stop_after
        return {row.name: row for row in made.rows()}

    return rows


SPEEDS = {BASELINE: 100.0, COPY: 100.0, "+ optimizer": 100.0, "profile": 150.0, "- optimizer": 150.0}


def test_rounds_are_interleaved_and_rotated(measure: Measure) -> None:
    machine = Machine(SPEEDS, noise=0.01)
    measure(machine)
    names = [name for name, _, _ in machine.trials]
    assert names[:5] == [BASELINE, COPY, "+ optimizer", "profile", "- optimizer"]
    assert names[5:10] == [COPY, "+ optimizer", "profile", "- optimizer", BASELINE]
    assert "+ tf32" not in names
    assert machine.said[:2] == ["comparing losses without dropout", f"comparing losses without dropout: {BASELINE}"]
    assert f"round 1 of 5: {COPY}, at most 0 s left" in machine.said
    assert [(steps, without) for _, steps, without in machine.trials[:5]] == [(FIRST_STEPS, True)] * 5
    assert not any(without for _, _, without in machine.trials[5:])


def test_every_variant_trains_the_rows_that_the_baseline_trains_in_the_time(measure: Measure) -> None:
    machine = Machine(SPEEDS)
    measure(machine, seconds=20.0)
    steps = dict(name_steps[:2] for name_steps in machine.trials[5:])
    assert steps == {BASELINE: 250, COPY: 250, "+ optimizer": 250, "profile": 125, "- optimizer": 125}  # 2,000 rows
    machine.trials.clear()
    measure(machine, seconds=0.1)
    assert {steps for _, steps, _ in machine.trials[5:]} == {LEAST_STEPS}
    machine.trials.clear()
    measure(machine, steps=12)
    assert dict(name_steps[:2] for name_steps in machine.trials[5:])["profile"] == 12
    assert dict(name_steps[:2] for name_steps in machine.trials[5:])[BASELINE] == 24


def test_clear_variant_stops_after_three_rounds(measure: Measure) -> None:
    machine = Machine(SPEEDS | {"+ optimizer": 130.0}, noise=0.01)
    rows = measure(machine, rounds=5)
    assert rows["+ optimizer"].rounds == 3
    assert rows["+ optimizer"].speedup.clear
    # left out of the profile, the optimizer changes nothing: all rounds, and so its reference and the noise floor
    assert [rows[name].rounds for name in ("- optimizer", "profile", BASELINE, COPY)] == [5, 5, 5, 5]
    assert not rows["- optimizer"].speedup.clear


def test_crash_and_out_of_memory_are_rows(measure: Measure) -> None:
    failing = {"+ optimizer": ("crashed", "ValueError: a bug"), "- optimizer": ("out of memory", "16 rows do not fit")}
    machine = Machine(SPEEDS, failing=failing)
    rows = measure(machine)
    assert (rows["+ optimizer"].ending, rows["+ optimizer"].note) == ("crashed", "ValueError: a bug")
    assert (rows["- optimizer"].ending, rows["- optimizer"].note) == ("out of memory", "16 rows do not fit")
    assert (rows["+ tf32"].ending, rows["+ tf32"].note) == ("not applied here", "no card")
    assert [name for name, _, _ in machine.trials].count("+ optimizer") == 1
    assert rows["profile"].speedup.value == pytest.approx(1.5)


def test_interrupted_bench_keeps_what_was_measured(measure: Measure) -> None:
    rows = measure(Machine(SPEEDS, stop_after=8))
    assert [row.rounds for row in rows.values()] == [0, 1, 1, 0, 1, 0]
    assert rows["profile"].speedup is None
    rows = measure(Machine(SPEEDS, stop_after=1))
    assert rows["profile"].ending == "not measured"


def test_row_has_the_medians(measure: Measure) -> None:
    rows = measure(Machine(SPEEDS))
    row = rows["profile"]
    assert (row.samples_per_second, row.tokens_per_second, row.peak_gib) == (pytest.approx(150), pytest.approx(1500), 1.5)
    assert (row.seconds_per_step, row.seconds_per_epoch) == (pytest.approx(8 / 150), pytest.approx(80 / 150))


def test_losses_are_compared_with_those_of_the_reference(measure: Measure) -> None:
    losses = {"+ optimizer": (2.0, 1.001), COPY: (2.0, 1.5)}
    rows = measure(Machine(SPEEDS, losses=losses))
    assert (rows["+ optimizer"].loss, rows["+ optimizer"].loss_agrees) == ("up to 0.001 apart", True)
    assert (rows[COPY].loss, rows[COPY].loss_agrees) == ("up to 0.5 apart", False)
    assert (rows["profile"].loss, rows["profile"].loss_agrees) == ("not compared: 16 instead of 8 rows per step", None)
    assert (rows["- optimizer"].loss, rows["- optimizer"].loss_agrees) == ("equal", True)
