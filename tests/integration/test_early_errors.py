"""Bad input is reported before torch is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cases import named
from hostile.test_input import JOB, check_message


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working folder with a valid job."""
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_bytes(JOB)


ALONE: list[tuple[str, ...]] = [
    ("run", "job.toml", "--profile", "no-such"),
    ("run", "no-such.toml", "--profile", "cpu"),
    ("run", "job.toml", "--profile", "cpu", "--set", "training.learning_rat=1"),
    ("run", "job.toml", "--profile", "cpu", "--set", "plugins.dataloader.num_workers=-1", "--processes", "2"),
    ("run", "job.toml", "--profile", "cpu", "--memory-limit", "8x"),
    ("run", "job.toml", "--profile", "cpu", "--name", "../x"),
    ("run", "job.toml", "--profile", "cpu", "--output-dir", "job.toml"),
    ("run", "job.toml", "--profile", "cpu", "--resume-from", "no-such"),
    ("run", "job.toml", "--profile", "cpu", "--resume", "--fresh"),
    ("--no-such",),
    ("profiles", "show", "/dev/zero.toml"),
    ("plan", "a_pipe.toml"),
    ("export", "job.toml", "--profile", "cpu", "--to", "accelerate", "--set", "plugins.no_such.x=1"),
]
SHORT = (
    "run no-such.toml --profile cpu",
    "run job.toml --profile cpu --set training.learning_rat=1",
    "--no-such",
    "plan a_pipe.toml",
)
WITHOUT_TORCH = "import sys; from hwopt.cli import run_command; print(run_command(sys.argv[1:]), 'torch' in sys.modules)"


@pytest.mark.parametrize("arguments", named({" ".join(each): each for each in ALONE}, SHORT))
def test_bad_input_is_reported_before_torch_is_imported(arguments: tuple[str, ...]) -> None:
    """The import of torch takes longer than everything else."""
    os.mkfifo("a_pipe.toml")
    command = [sys.executable, "-c", WITHOUT_TORCH, *arguments]
    found = subprocess.run(command, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL)
    assert found.stdout == "2 False\n"
    check_message(found.stderr)
