"""`hwopt run --processes 2`: the real launcher and real ranks over gloo, in separate processes.

Imports take most of the time, so independent launches run at the same time.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from integration.forks import forked_ranks, wait_for_exit
from safetensors.torch import load_file

from hwopt.cli import run_command
from hwopt.runs.launch import broadcast_folder
from hwopt.testing import TINY_BERT, write_samples

PROFILE = (
    'name = "ranks"\n[plugins.precision]\ndtype = "fp32"\n[plugins.batch]\ntrain = 3\neffective = 12\n[plugins.length_batching]\n'
)
RUN = ["run", "job.toml", "--profile", "./ranks.toml"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_samples(tmp_path / "train.jsonl", 41)  # the last step of an epoch is partial
    write_samples(tmp_path / "dev.jsonl", 13, seed=1)
    config = ", ".join(f"{key} = {json.dumps(value)}" for key, value in TINY_BERT.items())
    (tmp_path / "job.toml").write_text(
        f'[model]\nconfig = {{ {config} }}\n[data]\ntrain = "train.jsonl"\neval = "dev.jsonl"\nmax_length = 32\n'
        "[training]\nmax_steps = 10\nlearning_rate = 1e-3\nlogging_steps = 1\neval_steps = 5\n"
    )
    (tmp_path / "ranks.toml").write_text(PROFILE)
    return tmp_path


def start(folder: Path, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "hwopt", *arguments, "--processes", "2"],
        cwd=folder,
        env={**os.environ, "COLUMNS": "150", "OMP_NUM_THREADS": "1"},
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


def status(folder: Path, name: str) -> int | None:
    found: int | None = json.loads((folder / "runs" / name / "status.json").read_text())["exit_code"]
    return found


def running(word: str, folder: Path) -> list[str]:
    """The command lines with `word` of the processes whose working folder is `folder`. Other tests may use the same names."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            line = " ".join(process.cmdline())
            if word in line and Path(process.cwd()) == folder.resolve():
                found.append(line)
    return found


def weights(folder: Path) -> torch.Tensor:
    found = load_file(folder / "final" / "model.safetensors")
    # the gradient of key.bias is 0 in exact arithmetic; Adam turns its rounding noise into full steps
    return torch.cat([value.flatten().double() for name, value in sorted(found.items()) if not name.endswith("key.bias")])


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
    assert status(folder, "job-ranks") == 0
    assert json.loads((folder / "runs" / "job-ranks" / "plan.json").read_text())["world_size"] == 2

    monkeypatch.chdir(folder)
    assert run_command([*RUN, "--set", "data.max_length=31", "--processes", "1"]) == 0, capsys.readouterr().err
    expected = weights(folder / "runs" / "job-ranks-2")  # the next free name
    assert (weights(folder / "runs" / "job-ranks") - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.soak
def test_bad_input_is_reported_once(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    cases = {
        2: ["run", "job.toml", "--profile", "rtx3070-8gb"],
        -2: [*RUN, "--set", "training.learning_rat=1"],
        4: [*RUN, "--set", "data.label=lable"],
    }
    processes = {code: start(folder, *arguments) for code, arguments in cases.items()}
    monkeypatch.chdir(folder)
    for code, arguments in cases.items():
        assert run_command(arguments) == abs(code)
        assert end(processes[code]) == (abs(code), capsys.readouterr().err)
    assert not (folder / "runs").exists()


def test_cause_of_the_end_is_reported_once(folder: Path) -> None:
    """Two causes: a non-finite gradient, which all ranks report, and a killed rank, which reports nothing."""
    diverged = start(folder, *RUN, "--name", "diverged", "--set", "training.learning_rate=1e30")
    killed = start(folder, *RUN, "--name", "killed", *LONG, "--set", "plugins.dataloader.num_workers=1")
    until_step(killed)
    ranks = {rank.environ()["RANK"]: rank for rank in psutil.Process(killed.pid).children()}
    ranks["1"].kill()
    code, errors = end(killed)
    assert (code, status(folder, "killed")) == (9, 9), errors
    assert errors.startswith("error: rank 1 was killed (SIGKILL)")
    assert len(errors.splitlines()) == 1
    assert not running(" killed ", folder), "nor its data-loading workers"

    code, errors = end(diverged)
    assert (code, status(folder, "diverged")) == (5, 5), errors
    assert errors.startswith("error: a gradient was not finite")
    assert len(errors.splitlines()) == 1


LONG = ["--set", "training.max_steps=100000"]


def until_step(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert any(line.startswith("step 3/") for line in process.stdout), process.communicate()


def test_signal_reaches_all_ranks_once(folder: Path) -> None:
    cases = {"terminated": (signal.SIGTERM, 143), "interrupted": (signal.SIGINT, 130)}
    processes = {name: start(folder, *RUN, "--name", name, *LONG) for name in cases}
    for name, process in processes.items():
        until_step(process)
        assert len(running(f" {name} ", folder)) == 3
    for name, (number, _) in cases.items():
        os.killpg(processes[name].pid, number)  # as a terminal does
    for name, (_, code) in cases.items():
        found, errors = end(processes[name])
        assert (found, status(folder, name)) == (code, code), errors
        first, *rest = errors.splitlines()
        assert first == "Stopping after this step, then saving. Signal again to exit now."
        assert rest in ([], [name])
        assert not running(f" {name} ", folder)


@pytest.mark.soak
def test_signal_while_ranks_start(folder: Path) -> None:
    """The ranks have no signal handlers yet."""
    process = start(folder, *RUN, "--name", "early")
    while process.poll() is None and len(running(" early ", folder)) < 3:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    assert end(process)[0] == 130
    assert not running(" early ", folder)
    assert not (folder / "runs").exists()


def test_ranks_agree_on_one_run_folder(warm: None, tmp_path: Path) -> None:
    def agree(rank: int) -> None:
        dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=rank, world_size=2)
        print(broadcast_folder(Path(f"runs/job-{rank}"), None, 0)[0].name)
        dist.destroy_process_group()

    output = tmp_path / "output"
    assert [wait_for_exit(pid) for pid in forked_ranks(agree, 2, tmp_path, output)] == [0, 0]
    assert output.read_text().split() == ["job-0", "job-0"]
