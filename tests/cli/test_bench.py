"""`hwopt bench`: bad input is one message, before anything is measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli.test_cli import write_job
from command_line import hwopt


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (["--profile", "nope"], 2, "--profile 'nope': no such profile"),
        (["--profile", "cpu", "--against", "nope"], 2, "--against 'nope': no such profile"),
        (["--profile", "cpu", "--against", "cpu"], 2, "--against cpu: this is the profile itself. Give another one"),
        (["--profile", "cpu", "--set", "data.train=missing.csv"], 4, "missing.csv"),
        (["--profile", "none.toml"], 2, "equal plans on this machine: there is nothing to compare"),
        (["--profile", "cpu", "--memory-limit", "8GiB"], 2, "this machine has no CUDA device"),
        (["--profile", "cpu", "-o", "no-folder/page.html"], 6, "-o no-folder/page.html: there is no folder 'no-folder'"),
    ],
)
def test_bad_input_is_one_message(arguments: list[str], code: int, expected: str, tmp_path: Path) -> None:
    write_job(tmp_path)
    (tmp_path / "none.toml").write_text('name = "none"\n[plugins.tf32]\n')
    before = sorted(tmp_path.rglob("*"))
    done = hwopt("bench", *arguments, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(tmp_path.rglob("*")) == before
