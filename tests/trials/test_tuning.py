"""`hwopt tune` with described outcomes in place of trials: its screen, its file, its messages and exit codes."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from cli.test_cli import write_job
from command_line import hwopt

from hwopt.planning.inputs import Inputs
from hwopt.records.throughput import Window
from hwopt.trials import tuning
from hwopt.trials.trial import Outcome, Variant
from hwopt.trials.tuning import measurement_of, without_compilation

Answer = Callable[[Variant, int], Outcome]


def outcome(seconds: float, wait: float = 0.0, **given: Any) -> Outcome:
    """A trial of 20 steps of `seconds`."""
    windows = tuple(Window(step, 1, seconds * (1 + 0.001 * (step % 3)), 16.0, 200.0) for step in range(1, 21))
    waits = {window.step: wait for window in windows}
    return Outcome("completed", windows=windows, peak_gib=0.5, data_waits=waits, **given)


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Answer], list[Variant]]:
    """Replaces trials of job.toml by answers; returns the variants that were asked for."""
    write_job(tmp_path)

    def answered_by(answer: Answer) -> list[Variant]:
        asked: list[Variant] = []

        def run(job: Path | None, variant: Variant, steps: int, folder: Path, limit_s: float, launch: Any) -> Outcome:
            asked.append(variant)
            return answer(variant, len(asked))

        monkeypatch.setattr(tuning, "run_trial", run)
        return asked

    return answered_by


def rows_of(variant: Variant) -> int:
    """The rows of a micro-batch of a variant of the profile cpu, which has 16."""
    given = [text.partition("=")[2] for text in variant.assignments if text.startswith("plugins.batch.train=")]
    return int(given[-1]) if given else 16


def best_at_4_rows(variant: Variant, number: int) -> Outcome:
    return outcome(1 + abs(math.log2(rows_of(variant) / 4)))


def tune(folder: Path, *arguments: str, **variables: str) -> CompletedProcess[str]:
    return hwopt("tune", "job.toml", "--profile", "cpu", *arguments, cwd=folder, **variables)


def test_screen_has_a_line_per_trial_and_the_file_the_best_setting(trials: Any, tmp_path: Path) -> None:
    trials(best_at_4_rows)
    done = tune(tmp_path, "-o", "mine.toml")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["trial", "real", "tokens/s", "of", "the", "start", "memory", "setting"]
    assert lines[1].split()[0] == "1"
    assert "the start" in lines[1]
    assert any("batch.train = 4" in line and "3.00" in line for line in lines)
    assert any(line.startswith("best: 3.00") for line in lines)
    assert "written: mine.toml" in lines
    assert not (tmp_path / "runs").exists()
    batch = Inputs().profile(str(tmp_path / "mine.toml")).content.plugins["batch"]
    assert (batch["train"], batch["gradient_accumulation_steps"]) == (4, 4)
    text = (tmp_path / "mine.toml").read_text(encoding="utf-8")
    assert "16 rows per optimizer step, as before" in text
    assert "times the speed of the start" in text
    plan = json.loads(hwopt("plan", "job.toml", "--profile", "./mine.toml", "--format", "json", cwd=tmp_path).stdout)
    assert plan["batch"]["step"] == 16


def test_start_that_is_best_writes_nothing(trials: Any, tmp_path: Path) -> None:
    asked = trials(lambda variant, number: outcome(1.0 if number == 1 else 2.0))
    done = tune(tmp_path)
    assert done.returncode == 0
    assert "best: the start: no trial is clearly faster. No file is written" in done.stdout
    assert not list(tmp_path.glob("*_tuned*.toml"))
    assert 2 <= len(asked) <= 12


def test_json_has_all_trials(trials: Any, tmp_path: Path) -> None:
    trials(best_at_4_rows)
    done = tune(tmp_path, "--format", "json")
    found = json.loads(done.stdout)
    assert found["file"] == "cpu_tuned.toml"
    assert found["best"]["assignments"] == [
        "plugins.batch.train=4", "plugins.batch.gradient_accumulation_steps=4", "plugins.batch.eval=16"
    ]  # fmt: skip
    assert found["best"]["ratio"]["value"] == pytest.approx(3.0)
    assert [row["number"] for row in found["trials"]] == list(range(1, len(found["trials"]) + 1))


def test_failed_trials_are_lines_of_the_table(trials: Any, tmp_path: Path) -> None:

    def answer(variant: Variant, number: int) -> Outcome:
        if number == 2:
            return Outcome("out of memory", "The step does not fit.\nMore text")
        if number == 3:
            return Outcome("timed out", "no end after 9 s")
        return outcome(1.0)

    trials(answer)
    done = tune(tmp_path)
    assert ": out of memory: The step does not fit." in done.stdout
    assert "More text" not in done.stdout
    assert ": time limit: no end after 9 s" in done.stdout


@pytest.mark.parametrize(
    ("ending", "code", "said"),
    [
        ("out of memory", 7, "The first trial, with the profile as it is, failed: out of memory: why"),
        ("timed out", 2, "failed: time limit: why. Give it more with --time-limit"),
    ],
)
def test_start_that_fails_is_an_error(trials: Any, ending: Any, code: int, said: str, tmp_path: Path) -> None:
    asked = trials(lambda variant, number: Outcome(ending, "why"))
    done = tune(tmp_path)
    assert done.returncode == code
    assert said in done.stderr
    assert len(asked) == 1


def test_interrupt_writes_the_best_so_far(trials: Any, tmp_path: Path) -> None:
    last = 1

    def answer(variant: Variant, number: int) -> Outcome:
        if number == last:
            raise KeyboardInterrupt
        return outcome(1.0 / number)

    trials(answer)
    assert tune(tmp_path).returncode == 130
    assert not list(tmp_path.glob("*_tuned*.toml")), "nothing was measured"
    last = 3
    trials(answer)
    done = tune(tmp_path)
    assert done.returncode == 130
    assert "ended: interrupted" in done.stdout
    assert "2 trials of 40 steps; interrupted" in (tmp_path / "cpu_tuned.toml").read_text(encoding="utf-8")


def test_option_that_the_job_sets_is_named(trials: Any, tmp_path: Path) -> None:
    """Plugin tables of a job win over those of a profile, so that the tuned profile alone would change nothing."""
    write_job(tmp_path, extra="[plugins.batch]\ntrain = 8\n")
    trials(best_at_4_rows)
    done = tune(tmp_path)
    assert "note: the job sets plugins.batch.train" in done.stdout
    assert "which wins over the profile. Remove it from the job" in done.stdout


def test_part_of_the_time_that_waits_for_data_is_weighted_by_the_steps() -> None:
    windows = (Window(1, 1, 1.0, 8, 80), Window(2, 1, 3.0, 8, 80))
    found = measurement_of(Outcome("completed", windows=windows, data_waits={2: 0.5}), "samples")
    assert found.data_wait == pytest.approx(1.5 / 4)
    assert measurement_of(outcome(1.0, reduced_rows=4), "tokens").failure == "out of memory"


def test_steps_that_compile_are_left_out_and_steps_that_wait_are_not() -> None:
    usual = [Window(step, 1, 1.0, 8, 80) for step in range(1, 9)]
    compiles, waits, long = Window(9, 1, 20.0, 8, 80), Window(10, 1, 20.0, 8, 80), Window(11, 1, 20.0, 8, 1600)
    assert without_compilation([*usual, compiles, waits, long], {10: 0.95}) == [*usual, waits, long]
