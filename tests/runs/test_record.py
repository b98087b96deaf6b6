"""What is read from a run folder: finished runs, killed ones, and folders that are none."""

import json
import os
import platform
from pathlib import Path

import psutil
import pytest
from report.run_folders import EVIDENCE, PLAN, eval_row, log_row, log_rows, write_run

from hwopt.errors import InputError
from hwopt.runs.folder import OWNER
from hwopt.runs.journal import command_line
from hwopt.runs.record import read_record


def owned(folder: Path, host: str = "", began: float | None = None) -> Path:
    """`folder`, in which this process trains, or one of another host, or one that has ended."""
    owner = {"pid": os.getpid(), "host": host or platform.node(), "folder": os.path.realpath(folder)}
    (folder / OWNER).write_text(json.dumps(owner | {"began": began or psutil.Process().create_time()}))
    return folder


def test_finished_run_is_read(tmp_path: Path) -> None:
    rows = [log_row(5), eval_row(5, f1=0.5), log_row(10, loss=None)]
    record = read_record(write_run(tmp_path / "run", rows, summary={"step": 10}, memory={"weights": 0.5}))
    assert (record.name, record.step, record.exit_code, record.complete, record.alive) == ("run", 10, 0, True, False)
    assert record.evidence == EVIDENCE
    assert record.held_gib == {"weights": 0.5}
    assert record.log_rows[1]["loss"] is None
    assert record.values("loss") == [1.95]
    assert record.state == "done, 10 steps"


def test_incomplete_line_is_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [log_row(5), log_row(10)])
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 15, "lo')
    assert read_record(folder).step == 10


@pytest.mark.parametrize(
    ("host", "began", "state"),
    [
        ("", None, "running, step 100 of 100"),
        ("elsewhere", None, "running, step 100 of 100"),
        ("", 1.0, "killed at step 100 of 100"),
    ],
)
def test_run_without_an_exit_code_trains_or_was_killed(host: str, began: float | None, state: str, tmp_path: Path) -> None:
    record = read_record(owned(write_run(tmp_path / "run", log_rows(), status=(None, "running")), host, began))
    assert record.state == state
    assert record.lost == (began is not None)


@pytest.mark.parametrize("plan", ["{", json.dumps({key: value for key, value in PLAN.items() if key != "batch"})])
def test_unreadable_plan_is_bad_input(plan: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [log_row(5)])
    (folder / "plan.json").write_text(plan)
    with pytest.raises(InputError, match="is not a plan of hwopt, or it is corrupt"):
        read_record(folder)


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["/usr/bin/python3", "/env/bin/hwopt", "run", "my job.toml"], "hwopt run 'my job.toml'"),
        (["python", "-m", "hwopt", "run"], "hwopt run"),
        (["python", "-u", "train.py", "--lr", "1"], "python -u train.py --lr 1"),
    ],
)
def test_command_is_what_a_shell_takes(words: list[str], command: str) -> None:
    assert command_line(words) == command


@pytest.mark.parametrize(
    ("first", "last", "status"),
    [
        ("active", "unknown", "active"),
        ("unknown", "active", "active"),
        ("active", "inactive", "inactive"),
        ("inactive", "active", "inactive"),
    ],
)
def test_evidence_of_the_first_and_the_last_step_is_one(first: str, last: str, status: str, tmp_path: Path) -> None:
    def entries(status: str, when: str) -> dict[str, object]:
        return {"plugins": [{"name": "batch", "status": status, "seen": f"{status} in the {when} step"}]}

    evidence = entries(first, "first") | {"at_end": entries(last, "last")}
    (found,) = read_record(write_run(tmp_path / "run", [log_row(5)], evidence=evidence)).evidence
    assert found["status"] == status
    when = "last" if last == status else "first"
    assert found["seen"] == f"{status} in the {when} step"


def test_best_value_is_the_last_one_if_the_direction_is_unknown(tmp_path: Path) -> None:
    record = read_record(write_run(tmp_path / "run", [eval_row(5, f1=0.5), eval_row(10, f1=0.4)], processes=[]))
    best = record.best("f1")
    assert (best.value, best.step) == (0.4, 10)
    assert record.seconds_per_epoch is None
