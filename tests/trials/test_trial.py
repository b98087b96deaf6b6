"""A trial: its outcome, from how the process ended and what it wrote."""

import json
from pathlib import Path

import pytest
from report.run_folders import PROCESS, log_row, write_run

from hwopt.records.run_files import read_object
from hwopt.trials.trial import OUTPUT, REQUEST, RESULT, Outcome, Variant, outcome_of, run_trial

VARIANT = Variant("mine", "cpu", ("plugins.batch.train=4",), without_dropout=True)
STEPS = 12


def write_trial(folder: Path, **files: object) -> Path:
    """The folder of a completed trial: step 1 is slow, and the last step is under the profiler."""
    speeds = [1.0, *[100.0 + step for step in range(2, STEPS)], 2.0]
    rows = [log_row(step, speed, loss=1.0 / step) for step, speed in enumerate(speeds, 1)]
    write_run(folder, rows, **files)
    (folder / RESULT).write_text(json.dumps({"reduced_rows": 4}))
    return folder


def test_speed_leaves_out_profiled_steps_and_the_warm_up(tmp_path: Path) -> None:
    found = outcome_of(write_trial(tmp_path / "trial"), 0, STEPS)
    assert found.completed
    assert (found.peak_gib, found.reduced_rows) == (3.5, 4)
    assert [window.step for window in found.windows] == list(range(4, STEPS))  # a fifth of 10 is left out
    samples = found.rate("samples")
    assert 104 < samples < 111
    assert found.seconds_per_epoch == pytest.approx(50 * 16 / samples)
    assert found.losses == {step: 1.0 / step for step in range(1, STEPS + 1)}


def test_plugin_that_is_not_active_is_named(tmp_path: Path) -> None:
    evidence = {"plugins": [{"name": "tf32", "status": "inactive", "seen": "0 of 12 matmuls"}]}
    found = outcome_of(write_trial(tmp_path / "trial", evidence=evidence), 0, STEPS)
    assert found.not_active == ("tf32 inactive: 0 of 12 matmuls",)


@pytest.mark.parametrize(
    ("code", "message", "ending"),
    [
        (7, "Training does not fit", "out of memory"),
        (3, "plugin 'a' needs plugin 'b'", "refused"),
        (1, "ValueError: a bug", "crashed"),
    ],
)
def test_failed_trial_has_the_message_of_its_status(code: int, message: str, ending: str, tmp_path: Path) -> None:
    write_run(tmp_path / "trial", processes=[PROCESS], status=(code, message))
    assert outcome_of(tmp_path / "trial", code, STEPS) == Outcome(ending, message)


def test_process_that_died_is_described_by_its_output(tmp_path: Path) -> None:
    write_run(tmp_path / "trial", status=(None, "running"))
    (tmp_path / "trial" / OUTPUT).write_text("loading\nSegmentation \x1b[31mfault\n")
    found = outcome_of(tmp_path / "trial", -11, STEPS)
    assert (found.ending, found.message) == ("crashed", "ended by signal 11: Segmentation \\x1b[31mfault")
    killed = outcome_of(tmp_path / "trial", -9, STEPS)
    assert killed.message.startswith("killed (SIGKILL); the system does this if the host is out of memory")


def test_trial_is_asked_for_in_the_words_of_run(tmp_path: Path) -> None:
    asked = {}

    def launch(folder: Path, limit_s: float) -> None:
        asked.update(read_object(folder / REQUEST), limit_s=limit_s)

    found = run_trial(Path("job.toml"), VARIANT, 9, tmp_path / "trial", 5.0, launch)
    assert found == Outcome("timed out", "no end after 5 s")
    assert asked == {
        "name": "mine",
        "profile": "cpu",
        "assignments": ["plugins.batch.train=4"],
        "memory_limit": None,
        "without_dropout": True,
        "job": "job.toml",
        "steps": 9,
        "trusted": [],
        "limit_s": 5.0,
    }
