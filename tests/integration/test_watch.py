"""`hwopt report --watch` in a process of its own, beside the process that trains."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli.test_cli import write_job
from report.run_folders import log_rows, write_run
from runs.test_record import owned

HWOPT = (sys.executable, "-m", "hwopt")
SHOW_CURSOR = "\x1b[?25h"


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


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a pseudo-terminal")
def test_interrupt_restores_the_terminal_and_leaves_the_run(tmp_path: Path) -> None:
    import pty

    owned(write_run(tmp_path / "run", log_rows(), status=(None, "running")))
    main, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    with subprocess.Popen(
        [*HWOPT, "report", "--watch", "run", "--interval", "0.1"],
        cwd=tmp_path,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env=environment,
    ) as watch:
        os.close(terminal)
        shown = ""
        while "3.50 GiB" not in shown:
            shown += os.read(main, 4096).decode(errors="replace")
        watch.send_signal(signal.SIGINT)
        while part := read_or_end(main):
            shown += part
        assert watch.wait() == 0
    os.close(main)
    assert "running, step 100 of 100" in shown
    assert shown.rindex(SHOW_CURSOR) < shown.rindex("Stopped watching. The run continues.")
    assert "Traceback" not in shown


def read_or_end(terminal: int) -> str:
    """The next output; "" once the process has ended, at which a pseudo-terminal raises an error."""
    try:
        return os.read(terminal, 4096).decode(errors="replace")
    except OSError:
        return ""
