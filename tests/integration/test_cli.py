"""The command line in separate processes: a run, signals, closed pipes, a full disk."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli.test_cli import write_job

from hwopt.testing import finished, logged

HWOPT = [sys.executable, "-m", "hwopt"]


def test_run_writes_a_folder_that_reproduces_it(tmp_path: Path) -> None:
    write_job(tmp_path)  # job.toml is the default job file
    done = finished([*HWOPT, "run", "--profile", "rtx3070_8gb_batch16"], tmp_path, COLUMNS="200")
    assert done.returncode == 0, done.stderr
    for word in ("job: job.toml of this folder", "no CUDA device", "fallback", "skip", "evidence", "summary", "train_runtime"):
        assert word in done.stdout
    folder = tmp_path / "runs" / "job-rtx3070_8gb_batch16"
    names = {path.name for path in folder.iterdir()}
    assert {"job.toml", "profile.toml", "plan.json", "evidence.json", "metrics.jsonl", "status.json", "final"} <= names
    assert json.loads((folder / "status.json").read_text())["exit_code"] == 0
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert {"step", "epoch", "time", "loss", "learning_rate", "grad_norm", "tokens_per_second", "data_wait"} <= set(rows[0])
    assert any({"eval_loss", "eval_accuracy", "eval_f1"} <= set(row) for row in rows)
    evidence = json.loads((folder / "evidence.json").read_text())["plugins"]
    assert all(item["status"] != "inactive" for item in evidence), evidence

    given = [str(folder / "job.toml"), "--profile", str(folder / "profile.toml"), "--name", "again"]
    again = finished([*HWOPT, "run", *given], tmp_path)
    assert again.returncode == 0, again.stderr
    assert logged(tmp_path / "runs" / "again", "loss") == logged(folder, "loss"), "the files of a run folder repeat the run"


@contextlib.contextmanager
def training(folder: Path, workers: int = 0, errors: Any = subprocess.STDOUT) -> Iterator[subprocess.Popen[str]]:
    """A process that is training the run `long`, and is killed at the end of the block."""
    write_job(folder, max_steps=100_000)
    command = [*HWOPT, "run", "--profile", "cpu", "--name", "long", "--set", f"plugins.dataloader.num_workers={workers}"]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True)
    try:
        assert any(line.startswith("step 3/") for line in process.stdout)
        yield process
    finally:
        process.kill()
        process.communicate()


def test_signal_is_recorded_in_the_status(tmp_path: Path) -> None:
    with training(tmp_path, workers=2) as process:
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the workers get it too
        rest, _ = process.communicate(timeout=120)
    assert process.returncode == 130, rest
    assert "bug in hwopt" not in rest
    assert json.loads((tmp_path / "runs" / "long" / "status.json").read_text())["exit_code"] == 130


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_signal_stops_the_run_when_stderr_is_full(tmp_path: Path) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full, training(tmp_path, errors=full) as process:
        process.terminate()
        process.communicate(timeout=120)
    assert process.returncode == 143
    assert list((tmp_path / "runs" / "long").glob("checkpoint-*"))


@pytest.mark.parametrize("command", ["run", pytest.param("plan --format json", marks=pytest.mark.soak)])
def test_closed_pipe_does_not_end_the_command(command: str, tmp_path: Path) -> None:
    """For example `hwopt plan | head -1`. A run with a closed pipe trains to its end."""
    write_job(tmp_path, max_steps=2)
    words = [*HWOPT, *command.split(), "--profile", "cpu"]
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        errors = process.stderr.read().decode()
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    for status in (tmp_path / "runs").glob("*/status.json"):
        assert json.loads(status.read_text())["exit_code"] == 0
    assert command != "run" or list((tmp_path / "runs").glob("*/final/model.safetensors"))
