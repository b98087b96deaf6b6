"""`hwopt report --watch` in a process of its own, beside the process that trains."""

import subprocess
import sys
import time
from pathlib import Path

from cli.test_cli import write_job

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
