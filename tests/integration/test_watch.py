"""`hwopt report --watch` in a process of its own, beside the process that trains."""

from __future__ import annotations

import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from cli.test_cli import write_job
from report.run_folders import log_rows, write_run
from runs.test_record import owned
from terminals import on_terminal

from hwopt.cli import run_command

HWOPT = (sys.executable, "-m", "hwopt")


def test_watch_follows_a_run_of_another_process_to_its_end(tmp_path: Path) -> None:
    write_job(tmp_path, max_steps=40)
    command = [*HWOPT, "run", "job.toml", "--profile", "cpu", "--name", "mine"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as run:
        while not (tmp_path / "runs" / "mine" / ".owner.json").exists() and run.poll() is None:
            time.sleep(0.05)
        watch = subprocess.run(
            [*HWOPT, "report", "--watch", "runs/mine", "--interval", "0.1"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.wait() == 0
    assert (watch.returncode, watch.stderr) == (0, "")
    lines = watch.stdout.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("step ")] == [f"{step}/40" for step in range(1, 41)]
    assert lines[-1] == f"{Path('runs', 'mine')}: done, 40 steps"


def test_interrupt_restores_the_terminal_and_leaves_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    owned(write_run(tmp_path / "run", log_rows(), status=(None, "running")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "sleep", interrupt)
    shown = on_terminal(partial(run_command, ["report", "--watch", "run"]), 80)
    assert (shown.exit_code, shown.cursor) == (0, True)
    assert "running, step 100 of 100" in shown.text
    assert "3.50 GiB" in shown.text
    assert shown.lines[-1] == "Stopped watching. The run continues."
