"""`hwopt run --processes 2`: the real launcher and real ranks over gloo, in separate processes.

Imports take most of the time, so independent launches run at the same time.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from integration.forks import on_ranks
from integration.ranks_folder import FP32, RUN, write_job, write_profile
from safetensors.torch import load_file

from hwopt.cli import run_command
from hwopt.records.run_files import status_code
from hwopt.runs.launch import broadcast_folder
from hwopt.testing import relative_error


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_job(tmp_path, max_steps=10, eval_steps=5)
    write_profile(tmp_path, FP32 | {"length_batching": {}})
    return tmp_path


def start(folder: Path, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "hwopt", *arguments, "--processes", "2"],
        cwd=folder,
        env={**os.environ, "COLUMNS": "150"},
        stdin=subprocess.DEVNULL,
        text=True,
        # a background job of a shell ignores SIGINT, and its child processes inherit that
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        start_new_session=True,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options,
    )


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    """The exit code and stderr, which must not contain messages of torch's launcher."""
    try:
        _, errors = process.communicate(timeout=240)
    finally:
        process.kill()
    for foreign in ("Traceback", "CalledProcessError", "ChildFailedError", "torch.distributed", "SIGTERM"):
        assert foreign not in errors, errors
    return process.returncode, errors.removeprefix("loading torch …\n")


def running(word: str, folder: Path) -> list[str]:
    """The command lines with `word` of the processes whose working folder is `folder`. Other tests may use the same names."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            line = " ".join(process.cmdline())
            if word in line and Path(process.cwd()) == folder.resolve():
                found.append(line)
    return found


def read_terminal(descriptor: int) -> str:
    received = b""
    with contextlib.suppress(OSError):  # Linux raises it when the other side is closed
        while part := os.read(descriptor, 65536):
            received += part
    return received.decode()


def test_two_processes_match_one_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The terminal output is that of one process: in colour, in the width of the terminal."""
    import pty

    ours, theirs = pty.openpty()
    process = start(folder, *RUN, "--set", "data.max_length=31", stdout=theirs)
    os.close(theirs)
    screen = read_terminal(ours)
    os.close(ours)
    assert end(process) == (0, "")
    assert "\x1b[" in screen
    assert max(len(line) for line in screen.splitlines() if line.startswith("batch ")) > 100
    assert screen.count("evidence") == 1, "only rank 0 prints"
    assert status_code(folder / "runs" / "job-ranks") == 0
    assert json.loads((folder / "runs" / "job-ranks" / "plan.json").read_text())["world_size"] == 2

    monkeypatch.chdir(folder)
    assert run_command([*RUN, "--set", "data.max_length=31", "--processes", "1"]) == 0, capsys.readouterr().err
    runs = ("job-ranks", "job-ranks-2")  # the second one has the next free name
    assert relative_error(*(load_file(folder / "runs" / run / "final" / "model.safetensors") for run in runs)) <= 1e-6


def test_cause_of_the_end_is_reported_once(folder: Path) -> None:
    """Two causes: a non-finite gradient, which all ranks report, and a killed rank, which reports nothing."""
    diverged = start(folder, *RUN, "--name", "diverged", "--set", "training.learning_rate=1e30")
    killed = start(folder, *RUN, "--name", "killed", *LONG, "--set", "plugins.dataloader.num_workers=1")
    until_step(killed)
    ranks = {rank.environ()["RANK"]: rank for rank in psutil.Process(killed.pid).children()}
    ranks["1"].kill()
    code, errors = end(killed)
    assert (code, status_code(folder / "runs" / "killed")) == (9, 9), errors
    assert errors.startswith("error: rank 1 was killed (SIGKILL)")
    assert len(errors.splitlines()) == 1
    assert not running(" killed ", folder), "nor its data-loading workers"

    code, errors = end(diverged)
    assert (code, status_code(folder / "runs" / "diverged")) == (5, 5), errors
    assert errors.startswith("error: a gradient was not finite")
    assert len(errors.splitlines()) == 1


LONG = ["--set", "training.max_steps=100000"]


def until_step(process: subprocess.Popen[str]) -> None:
    assert any(line.startswith("step 3/") for line in process.stdout), process.communicate()


def test_ranks_agree_on_one_run_folder(warm: None, tmp_path: Path) -> None:
    def agree(rank: int) -> None:
        dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=rank, world_size=2)
        print(broadcast_folder(Path(f"runs/job-{rank}"), None, 0)[0].name)
        dist.destroy_process_group()

    assert on_ranks(agree, tmp_path).split() == ["job-0", "job-0"]
