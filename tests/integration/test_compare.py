"""`hwopt compare PROFILE PROFILE`: plans of two cards, which starts the tracing process."""

from __future__ import annotations

from pathlib import Path

from cli.test_cli import write_job
from command_line import hwopt


def test_profiles_are_compared_by_their_plans(tmp_path: Path) -> None:
    write_job(tmp_path)
    done = hwopt("compare", "rtx3070_8gb", "t4_16gb", "--set", "training.max_steps=4", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for part in ("peak memory", "samples/s", "hardware.name", "t4_16gb against rtx3070_8gb: ", "predicted, roofline"):
        assert part in done.stdout, part
