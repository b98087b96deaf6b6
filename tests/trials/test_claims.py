"""`hwopt bench --claims`: which claims are measured on which card, and the verdicts. No trial is run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hwopt.config.claim import Claim
from hwopt.hardware.device import Hardware, described
from hwopt.memory.claims import Finding, Forecast, judge
from hwopt.planning.inputs import Inputs
from hwopt.report.throughput import Window
from hwopt.trials import claims as claims_module
from hwopt.trials.benchmark import Effort, Progress
from hwopt.trials.claims import ClaimBench, Setting
from hwopt.trials.made_up_job import ROWS, write_made_up_job
from hwopt.trials.processes import Launch
from hwopt.trials.trial import Outcome, Variant

CARD = described("NVIDIA Some Card", (8, 6), 8.0)
CPU = described("a CPU", None, 16.0)
BEFORE = """name = "mine_before"
extends = "mine"
[plugins.batch]
train = 4
"""
CARD_TABLE = """[card]
match = ["Some Card"]
memory_gib = 8
compute_capability = "8.6"
"""
PROFILE = f"""name = "mine"
{CARD_TABLE}[tuned_for]
parameters = 1e6
max_length = 24
samples = 1000
config = {{ model_type = "bert", hidden_size = 32, num_hidden_layers = 1, num_attention_heads = 2, intermediate_size = 64, \
vocab_size = 300 }}
[training]
num_train_epochs = 5
[plugins.batch]
train = 8
"""
CLAIMS: dict[str, tuple[str, str]] = {
    "faster": ('what = "samples_per_second"\nexpect = [1.9, 2.1]\nagainst = "mine_before"', "confirmed"),
    "epoch": ('what = "epoch_seconds"\nexpect = [9, 10.5]', "confirmed"),
    "total": ('what = "total_seconds"\nexpect = [70, 80]', "refuted"),
    "memory": ('what = "peak_memory_gib"\nexpect = [2.4, 2.6]', "confirmed"),
    "allocator": ('what = "peak_memory_gib"\nmemory = "allocator"\nexpect = [2.4, 2.6]', "refuted"),
    "free": ('what = "free_memory_gib"\nexpect = [5.4, 5.6]', "confirmed"),
    "states": ('what = "optimizer_state_gib"\nexpect = [0.6, 1]', "refuted"),
    "gpu": ('what = "gpu_utilization"\nexpect = [90, 95]', "not measurable here"),
    "tf32": ('what = "steps_per_second"\nexpect = [1, 1]\nagainst_changes = ["plugins.batch.train=16"]', "confirmed"),
}


class NoForecast(Forecast):
    """Predicts nothing; `planned` gives the plan."""

    def check(self, profile: str, claim: Claim) -> Finding:
        return judge(profile, claim, None, "no forecast")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tables = "".join(f'[[claims]]\nsaid = "{name}"\nsource = "here"\n{text}\n' for name, (text, _) in CLAIMS.items())
    (tmp_path / "mine.toml").write_text(PROFILE + tables)
    (tmp_path / "mine_before.toml").write_text(BEFORE)
    return tmp_path


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[str, ...]]]:
    """(profile, changes) of each trial. One of `mine` trains 100 samples/s, of `mine_before` 50, the next round a tenth less."""
    found: list[tuple[str, tuple[str, ...]]] = []

    def run_trial(job: Path, variant: Variant, steps: int, folder: Path, limit_s: float, launch: Launch) -> Outcome:
        assert job.is_file()
        round_ = found.count((variant.profile, variant.assignments))
        found.append((variant.profile, variant.assignments))
        speed = (50.0 if "before" in variant.profile else 100.0) * 0.9**round_
        return Outcome(
            variant,
            "completed",
            windows=[Window(2, 1, 8 / speed, 8, 192)],
            peak_gib=1.5,
            memory_kind="torch's allocator",
            device_gib=2.5,
            held_gib={"optimizer_state": 0.5},
            not_active=("tf32 inactive: 0 matmuls",) if "before" in variant.profile else (),
            reduced_rows=4 if "plugins.batch.train=16" in variant.assignments else None,
        )

    monkeypatch.setattr(claims_module, "run_trial", run_trial)
    return found


def bench(folder: Path, machine: Hardware) -> tuple[ClaimBench, str]:
    """The bench, and the name of the profile."""
    inputs = Inputs()
    inputs.files = {**inputs.files, "mine": folder / "mine.toml", "mine_before": folder / "mine_before.toml"}
    forecast = NoForecast(inputs, folder / "cache")
    return ClaimBench(inputs, machine, forecast, folder / "trials", Effort(rounds=3)), "mine"


def test_claims_are_measured_on_the_card(folder: Path, trials: list[tuple[str, tuple[str, ...]]]) -> None:
    made, name = bench(folder, CARD)
    made.measure(name, Progress())
    findings = {finding.claim.said: finding for finding in made.findings(name)}
    assert {said: finding.verdict for said, finding in findings.items()} == {
        said: verdict for said, (_, verdict) in CLAIMS.items()
    }
    found = {said: (each.found.basis, each.found.low, each.found.high) for said, each in findings.items() if each.found}
    assert found["faster"] == ("measured", pytest.approx(2.0), pytest.approx(2.0))
    assert found["epoch"] == ("measured", pytest.approx(10.0), pytest.approx(10 / 0.81))
    assert found["total"] == ("measured", pytest.approx(50.0), pytest.approx(50 / 0.81))
    assert found["allocator"] == ("measured", 1.5, 1.5)
    assert findings["faster"].found.on == "bert, 0.0 M, 8 x 24 tokens, NVIDIA Some Card, rounds: 3"  # type: ignore[union-attr]
    assert findings["faster"].explanation == "mine_before: evidence: tf32 inactive: 0 matmuls"
    smaller = "8 rows ran out of memory: measured with micro-batches of 4"
    assert findings["tf32"].explanation == f"mine plugins.batch.train=16: {smaller}"
    assert findings["gpu"].explanation == "no forecast; the trial did not report the quantity"


def test_rounds_that_differ_much_confirm_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = iter([100.0, 30.0, 50.0])

    def run_trial(job: Path, variant: Variant, *_: Any) -> Outcome:
        return Outcome(variant, "completed", windows=[Window(2, 1, 8 / next(speeds), 8, 192)])

    monkeypatch.setattr(claims_module, "run_trial", run_trial)
    (folder / "mine.toml").write_text(PROFILE + '[[claims]]\nsaid = "wide"\nsource = "here"\n' + CLAIMS["epoch"][0])
    made, name = bench(folder, CARD)
    made.measure(name, Progress())
    (finding,) = made.findings(name)
    assert finding.verdict == "not measurable here"
    assert finding.explanation == "the rounds differ by a factor of 3.3; measure again on an idle machine"


def test_both_sides_of_a_ratio_are_measured_in_each_round(folder: Path, trials: list[tuple[str, tuple[str, ...]]]) -> None:
    made, name = bench(folder, CARD)
    made.measure(name, Progress())
    own, before, changed = ("mine", ()), ("mine_before", ()), ("mine", ("plugins.batch.train=16",))
    assert trials == [own, before, changed, before, changed, own, changed, own, before]


class Heard(Progress):
    """Keeps the estimates of the time left."""

    def __init__(self) -> None:
        self.left: list[float | None] = []

    def on_trial(self, name: str, number: int, rounds: int, seconds_left: float | None) -> None:
        self.left.append(seconds_left)


def test_progress_has_an_estimate_of_the_time_left(folder: Path, trials: list[tuple[str, tuple[str, ...]]]) -> None:
    made, name = bench(folder, CARD)
    made.trial_seconds = [10.0] * 99
    heard = Heard()
    made.measure(name, heard)
    assert heard.left == [pytest.approx(seconds) for seconds in (90, 80, 70, 60, 50, 40, 30, 20, 10)]


def test_nothing_is_measured_on_another_card(folder: Path, trials: list[tuple[str, tuple[str, ...]]]) -> None:
    for machine in (CPU, described("NVIDIA Other Card", (8, 6), 8.0), described("NVIDIA Some Card", (8, 6), 80.0)):
        made, name = bench(folder, machine)
        made.measure(name, Progress())
        assert trials == []
        for finding in made.findings(name):
            assert finding.verdict == "not measurable here"
            assert finding.explanation == f"no forecast; needs Some Card, found {machine.name}"


def test_ratios_of_profiles_without_a_card_are_measured_on_a_cpu(folder: Path) -> None:
    (folder / "mine.toml").write_text(PROFILE.replace(CARD_TABLE, ""))
    made, name = bench(folder, CPU)
    ratio = Claim(what="samples_per_second", expect=(1,), source="here", against="mine_before")
    absolute = Claim(what="samples_per_second", expect=(1,), source="here")
    assert made.obstacle(name, ratio) == ""
    assert made.obstacle(name, absolute) == "an absolute figure needs the name of its CPU: mine has no card.match"
    (folder / "mine.toml").write_text(PROFILE.replace(CARD_TABLE, '[card]\nmatch = ["a CPU"]\n'))
    assert bench(folder, CPU)[0].obstacle(name, absolute) == ""
    (folder / "mine.toml").write_text(PROFILE.replace(CARD_TABLE, '[card]\nmatch = ["EPYC"]\n'))
    assert bench(folder, CPU)[0].obstacle(name, absolute) == "needs EPYC, found a CPU"
    assert bench(folder, CARD)[0].obstacle(name, ratio) == "needs EPYC, found NVIDIA Some Card"


def test_no_forecast_is_made_after_an_interruption(folder: Path, trials: list[tuple[str, tuple[str, ...]]]) -> None:
    class Slow(NoForecast):
        def check(self, profile: str, claim: Claim) -> Finding:
            raise AssertionError("a forecast takes minutes")

    made, name = bench(folder, CARD)
    made.run_trial(Setting(name), made.job_of(name), 0, lambda folder, seconds: 0)
    made.forecast, made.interrupted = Slow(made.inputs, folder / "cache"), True
    findings = {finding.claim.said: finding for finding in made.findings(name)}
    assert findings["epoch"].verdict == "confirmed"
    assert findings["faster"].explanation == "interrupted before it was measured"


def test_failed_trial_leaves_the_forecast(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_trial(job: Path, variant: Variant, *rest: object) -> Outcome:
        return Outcome(variant, "out of memory", "it does not fit")

    monkeypatch.setattr(claims_module, "run_trial", run_trial)
    made, name = bench(folder, CARD)
    made.measure(name, Progress())
    explanations = {finding.explanation for finding in made.findings(name)}
    assert "no forecast; not measured: mine: out of memory: it does not fit" in explanations


def test_made_up_rows_fill_the_length(folder: Path) -> None:
    from hwopt import api

    inputs = Inputs()
    job = write_made_up_job(inputs.profile(str(folder / "mine.toml")), folder / "made")
    lines = (folder / "made" / "train.jsonl").read_text().splitlines()
    assert len(lines) == ROWS
    assert {json.loads(line)["label"] for line in lines} == {"a", "b"}
    found = api.preview("cpu", job, cache=folder / "cache")
    assert found.tokens == 24
    plan = api.resolve("cpu", job, cache=folder / "cache")
    assert plan.job.model.config == {**inputs.profile(str(folder / "mine.toml")).content.tuned_for.config}
