"""`hwopt bench --claims` with real trials on this CPU: ratios between two profiles are measured and get a verdict."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

MODEL = """{ model_type = "bert", vocab_size = 300, hidden_size = 32, num_hidden_layers = 1, num_attention_heads = 2, \
intermediate_size = 64 }"""
PROFILE = f"""name = "mine"
[tuned_for]
parameters = 2e4
max_length = 16
samples = 1000
config = {MODEL}
[plugins.batch]
train = 8
[[claims]]
what = "samples_per_second"
said = "faster"
against = "./slow.toml"
expect = [0.001]
source = "here"
[[claims]]
what = "epoch_seconds"
said = "a million times longer"
against_changes = ["plugins.batch.train=4"]
expect = [1e6]
source = "here"
[[claims]]
what = "optimizer_state_gib"
said = "the same states"
against = "./slow.toml"
expect = [1, 1]
source = "here"
[[claims]]
what = "samples_per_second"
said = "no card"
expect = [1]
source = "here"
"""
SLOW = f"""name = "slow"
[tuned_for]
parameters = 2e4
max_length = 16
config = {MODEL}
[plugins.batch]
train = 4
"""


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "mine.toml").write_text(PROFILE)
    (tmp_path / "slow.toml").write_text(SLOW)
    (tmp_path / "tmp").mkdir()
    return tmp_path


def claims(work: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "hwopt", "bench", "--profile", "mine.toml", "--claims", "--rounds", "3", *arguments]
    environment = os.environ | {"TMPDIR": str(work / "tmp"), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=work, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def findings(output: str) -> dict[str, dict[str, Any]]:
    """The findings that JSON output has, by what the source says."""
    return {finding["said"]: finding for finding in json.loads(output)}


def test_ratios_of_two_cpu_profiles_are_measured(work: Path) -> None:
    process = claims(work, "--steps", "12", "--format", "json")
    output, message = process.communicate(timeout=300)
    assert process.returncode == 0, message
    found = findings(output)
    verdicts = {said: finding["verdict"] for said, finding in found.items()}
    assert verdicts == {
        "faster": "confirmed",
        "a million times longer": "refuted",
        "the same states": "confirmed",
        "no card": "not measurable here",
    }
    for said in ("faster", "a million times longer", "the same states"):
        figure = found[said]["found"]
        assert figure["basis"] == "measured"
        assert 0 < figure["low"] <= figure["high"]
        assert "8 x 16 tokens" in figure["on"]
        assert figure["on"].endswith("rounds: 3")
    assert found["the same states"]["found"]["low"] == pytest.approx(1)
    assert "an absolute figure needs the name of its CPU: mine.toml has no card.match" in found["no card"]["explanation"]
    assert list((work / "tmp").glob("hwopt-*")) == []


def test_interrupted_claims_show_what_was_measured(work: Path) -> None:
    process = claims(work, "--steps", "1000000", "--format", "json")
    end = time.monotonic() + 300
    while not any(path.stat().st_size for path in (work / "tmp").rglob("metrics.jsonl")):
        assert time.monotonic() < end
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output, message = process.communicate(timeout=200)
    assert process.returncode == 130, message
    assert "Traceback" not in message
    found = findings(output)
    assert found["faster"]["found"] is None
    assert found["faster"]["explanation"] == "interrupted before it was measured"
    assert list((work / "tmp").glob("hwopt-*")) == []
