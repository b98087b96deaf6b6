"""Run folders: their names, their lock, and the folder in which a run resumes."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest

from hwopt.errors import FolderInUseError, InputError
from hwopt.runs.folder import LOCK, OWNER, Target, folder_for_resume, in_use_on_this_host, lock_run_folder, run_folder


def test_default_name_is_the_first_free_one(tmp_path: Path) -> None:
    assert run_folder(tmp_path / "runs", None, "my job!") == tmp_path / "runs" / "my-job"
    for name in ("job", "job-2"):
        (tmp_path / name).mkdir()
    assert run_folder(tmp_path, None, "job") == tmp_path / "job-3"
    assert run_folder(tmp_path, None, "job", resume=True) == tmp_path / "job-2"
    assert run_folder(tmp_path, None, "job", fresh=True) == tmp_path / "job-2"
    assert run_folder(tmp_path, None, "...") == tmp_path / "run"
    assert list(tmp_path.iterdir()) != []


def test_existing_name_is_refused_unless_resumed(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(InputError, match="--name mine: .* exists.*--resume.*--fresh"):
        run_folder(tmp_path, "mine", "")
    assert run_folder(tmp_path, "mine", "", resume=True) == tmp_path / "mine"
    assert run_folder(tmp_path, "mine", "", fresh=True) == tmp_path / "mine"


def test_lock_keeps_another_trainer_out_and_leaves_no_trace(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with lock_run_folder(folder):
        assert in_use_on_this_host(folder)
        with (
            pytest.raises(FolderInUseError, match=rf"is in use: process {os.getpid()} on .* trains there"),
            lock_run_folder(folder, resume=True),
        ):
            raise AssertionError("two trainers in one folder")
        with pytest.raises(FolderInUseError):
            run_folder(tmp_path, "run", "", resume=True)
        (folder / "metrics.jsonl").write_text("")
    assert [path.name for path in folder.iterdir()] == ["metrics.jsonl"]
    assert not in_use_on_this_host(folder)
    with lock_run_folder(tmp_path / "other"):
        shutil.copytree(tmp_path / "other", tmp_path / "copy")
        assert not in_use_on_this_host(tmp_path / "copy")
    assert not (tmp_path / "other").exists(), "the run wrote nothing"


def test_folder_of_a_killed_run_that_no_process_waits_for_is_free(tmp_path: Path) -> None:
    with lock_run_folder(tmp_path / "run") as folder:
        owner = json.loads((folder / OWNER).read_text())
        process = psutil.Popen(["sleep", "60"])
        (folder / OWNER).write_text(json.dumps(owner | {"pid": process.pid, "began": process.create_time()}))
        assert in_use_on_this_host(folder)
        os.kill(process.pid, signal.SIGKILL)
        while process.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        assert not in_use_on_this_host(folder)
        process.wait()


def test_new_run_does_not_overwrite_an_old_one(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("old")
    with pytest.raises(InputError, match="exists"), lock_run_folder(tmp_path / "run"):
        raise AssertionError("an old run is overwritten")
    with lock_run_folder(tmp_path / "run", fresh=True) as folder:
        assert {path.name for path in folder.iterdir()} == {LOCK, OWNER}
    assert (tmp_path / "run.old" / "metrics.jsonl").read_text() == "old"


def test_newest_checkpoint_resumes_in_its_own_folder(tmp_path: Path) -> None:
    own = tmp_path / "run"
    for step in (5, 10):
        (own / f"checkpoint-{step}").mkdir(parents=True)
    assert folder_for_resume(own / "checkpoint-10", tmp_path, None, "run") == own
    assert folder_for_resume(own / "checkpoint-5", tmp_path, None, "run") == tmp_path / "run-2"
    assert folder_for_resume(own / "checkpoint-10", tmp_path, "other", "run") == tmp_path / "other"
    (tmp_path / "other").mkdir()
    with pytest.raises(InputError, match="--name other: .* exists"):
        folder_for_resume(own / "checkpoint-10", tmp_path, "other", "run")


def test_target_without_a_name_takes_the_next_free_folder(tmp_path: Path) -> None:
    target = Target(tmp_path)
    assert target.folder("job-cpu") == tmp_path / "job-cpu"
    (tmp_path / "job-cpu").mkdir()
    next_folder = target.next_folder("job-cpu")
    assert next_folder is not None
    assert next_folder() == target.folder("job-cpu") == tmp_path / "job-cpu-2"
    assert Target(tmp_path, "mine").next_folder("job-cpu") is None


def test_target_takes_paths_as_text(tmp_path: Path) -> None:
    (checkpoint := tmp_path / "run" / "checkpoint-5").mkdir(parents=True)
    assert Target(str(tmp_path)).folder("job") == tmp_path / "job"
    assert Target(resume=str(checkpoint)).resume == checkpoint  # not merely True
    assert [Target(resume=empty).resume for empty in (None, "")] == [False, False]
