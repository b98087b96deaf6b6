"""However a run ends, its folder holds the exit code and the message, and its lock is gone."""

import errno
import os
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hwopt import api
from hwopt.errors import FolderInUseError, NonFiniteError, StorageError
from hwopt.planning.plan import Plan
from hwopt.records.run_files import read_status
from hwopt.runs.folder import LOCK, lock_run_folder, run_folder
from hwopt.testing import Recorder, plan_for, tiny_job, tiny_profile


def make_plan(folder: Path, **training: Any) -> Plan:
    return plan_for(tiny_profile(), tiny_job(folder / "data", **({"max_steps": 3, "logging_steps": 1} | training)))


class Failing(Recorder):
    """Raises an error, or calls a function, at the row of step 2."""

    def __init__(self, what: Any) -> None:
        super().__init__()
        self.what = what

    def on_log(self, run: Any, row: Any) -> None:
        super().on_log(run, row)
        if row["step"] == 2 and "loss" in row:
            if isinstance(self.what, BaseException):
                raise self.what
            self.what()


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (RuntimeError("a bug"), 1, "a bug"),
        (NonFiniteError("the loss diverged."), 5, "the loss diverged. The newest checkpoint is"),
        (
            OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
            6,
            f"{os.strerror(errno.ENOSPC)}. Free some space, and resume with --resume",
        ),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "), 9, "worker"),
        (KeyboardInterrupt(), 130, "interrupted after step"),
        (SystemExit(143), 143, "terminated after step"),
    ],
    ids=["bug", "diverged", "full disk", "dead worker", "interrupt", "termination"],
)
def test_error_of_a_run_is_in_its_status(error: BaseException, code: int, message: str, tmp_path: Path) -> None:
    with pytest.raises(BaseException) as caught:
        api.execute(make_plan(tmp_path), tmp_path / "run", Failing(error), cache=tmp_path / "cache")
    assert caught.value is error or caught.value.__cause__ is error
    assert isinstance(caught.value, StorageError) == (code == 6)
    found, status_message = read_status(tmp_path / "run")
    assert found == code
    assert message in status_message
    assert not (tmp_path / "run" / LOCK).exists()
    assert not (tmp_path / "run" / "final").exists()


def test_too_small_disk_is_reported_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100_000))
    with pytest.raises(
        StorageError, match=r"needs .* GiB, .*checkpoint\(s\) of .* GiB are free|checkpoint\(s\) of .*GiB are free"
    ):
        api.execute(make_plan(tmp_path), tmp_path / "run", cache=tmp_path / "cache")
    assert read_status(tmp_path / "run")[0] == 6
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_run_without_a_name_takes_the_next_folder_if_another_process_is_faster(tmp_path: Path) -> None:
    plan = plan_for(tiny_profile(), tiny_job(tmp_path / "data", max_steps=1))
    runs = tmp_path / "runs"
    chosen = run_folder(runs, None, "job-tiny")
    with lock_run_folder(chosen):  # the other process
        api.execute(plan, chosen, cache=tmp_path / "cache", next_folder=partial(run_folder, runs, None, "job-tiny"))
        with pytest.raises(FolderInUseError):
            api.execute(plan, chosen, cache=tmp_path / "cache")
    assert (runs / "job-tiny-2" / "final" / "model.safetensors").is_file()
    assert not (runs / "job-tiny").exists()
