"""`hwopt claims`: the verdicts on the screen and as JSON, and the messages for what cannot be checked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import hwopt

PROFILE = """name = "mine"
[card]
match = ["a card"]
memory_gib = 8
compute_capability = "8.6"
[[claims]]
what = "gpu_utilization"
said = "95%+"
expect = [95]
source = "a forum"
[[claims]]
what = "samples_per_second"
expect = [1, 2]
source = "a forum"
missing = "the forum names no model"
"""


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(PROFILE, encoding="utf-8")
    return path


def test_claims_are_printed_with_their_verdicts(profile: Path, tmp_path: Path) -> None:
    done = hwopt("claims", "--profile", str(profile), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "95%+ (a forum)" in done.stdout
    assert "the forum names no model" in done.stdout
    assert "claims: 2 not measurable here" in done.stdout


def test_claims_as_json(profile: Path, tmp_path: Path) -> None:
    done = hwopt("claims", "--profile", str(profile), "--format", "json", cwd=tmp_path)
    first, second = json.loads(done.stdout)
    assert (first["what"], first["verdict"], first["found"]) == ("gpu_utilization", "not measurable here", None)
    assert second["explanation"] == "the forum names no model"


def test_profile_without_claims_is_named(tmp_path: Path) -> None:
    done = hwopt("claims", "--profile", "cpu", cwd=tmp_path)
    assert done.returncode == 2
    assert "error: --profile cpu: no claims" in done.stderr


def test_claim_that_needs_a_plan_needs_the_model(profile: Path, tmp_path: Path) -> None:
    profile.write_text(PROFILE + '[[claims]]\nwhat = "rows_per_step"\nexpect = [8]\nsource = "a forum"\n', encoding="utf-8")
    done = hwopt("claims", "--profile", str(profile), cwd=tmp_path)
    assert done.returncode == 2
    assert "mine.toml: tuned_for.config is missing; add the model, as in model.config of a job" in done.stderr
