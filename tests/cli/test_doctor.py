"""`hwopt doctor`: its output and exit code."""

import json
from pathlib import Path

import pytest
from command_line import hwopt

from hwopt.hardware import doctor
from hwopt.hardware.doctor import CheckResult

FINE = CheckResult("ok", "torch 2.13.0")
WARNING = CheckResult("warning", "/dev/shm has 0.06 GiB", "docker run --shm-size=8g " + "x" * 200)
PROBLEM = CheckResult("problem", "no driver", "sudo ubuntu-drivers install")
FINDINGS = {"torch": FINE, "shared memory": WARNING}


@pytest.mark.parametrize(("findings", "code"), [(FINDINGS, 0), (FINDINGS | {"driver": PROBLEM}, 2)])
def test_exit_code_tells_of_problems(
    findings: dict[str, CheckResult], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda _: findings)
    assert hwopt("doctor", cwd=tmp_path).returncode == code
    found = hwopt("doctor", "--format", "json", cwd=tmp_path)
    assert found.returncode == code
    assert {each.pop("check"): CheckResult(**each) for each in json.loads(found.stdout)} == findings


def test_commands_are_never_folded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "examine", lambda _: FINDINGS | {"driver": PROBLEM})
    lines = hwopt("doctor", cwd=tmp_path, COLUMNS="60").stdout.splitlines()
    assert lines[0].split() == ["ok", "torch", "torch", "2.13.0"]
    assert lines[2].endswith(f"fix: {WARNING.fix}")
    assert lines[-1] == "problems: 1, warnings: 1"
