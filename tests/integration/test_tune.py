"""`hwopt tune` of a tiny job with real trials, each in a process of its own."""

import json
from pathlib import Path

import pytest
from cli.test_cli import write_job
from command_line import hwopt

from hwopt import api

pytestmark = pytest.mark.daily

FEW = ("--steps", "8", "--trials", "4")


def test_tune_of_a_tiny_job_keeps_the_rows_per_step_and_leaves_no_run(tmp_path: Path) -> None:
    write_job(tmp_path)
    given = ["plugins.batch.train=1", "plugins.batch.effective=16"]
    words = [word for text in given for word in ("--set", text)]
    done = hwopt("tune", "job.toml", "--profile", "cpu", *words, *FEW, "--format", "json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert 2 <= len(found["trials"]) <= 4
    assert all(row["rate"] > 0 and row["peak_gib"] > 0 for row in found["trials"] if not row["failure"])
    for row in found["trials"]:
        plan = api.resolve("cpu", tmp_path / "job.toml", assignments=[*given, *row["assignments"]])
        assert plan.batch.step == 16
    left = {"dev.jsonl", "job.toml", "train.jsonl"}
    if found["best"]["number"] > 1:  # which setting is the fastest depends on the machine
        assert found["file"] == "cpu_tuned.toml"
        left.add("cpu_tuned.toml")
        written = api.resolve(str(tmp_path / "cpu_tuned.toml"), tmp_path / "job.toml")
        best = api.resolve("cpu", tmp_path / "job.toml", assignments=[*given, *found["best"]["assignments"]])
        assert [entry.options for entry in written.applied()] == [entry.options for entry in best.applied()]
        checked = hwopt("check", "cpu_tuned.toml", "--format", "json", cwd=tmp_path)
        assert checked.returncode == 0, checked.stdout
    assert {path.name for path in tmp_path.iterdir()} == left
