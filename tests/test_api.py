"""`api.plan` and `api.train`: what `hwopt plan` and `hwopt run` do, in one call."""

import json
from pathlib import Path

import pytest
from cli.test_cli import write_job

from hwopt import api
from hwopt.errors import InputError
from hwopt.memory.advice import PlanListener
from hwopt.planning.plan import Plan

STEPS = ("training.max_steps=2", "training.logging_steps=1")


class Shown(PlanListener):
    def __init__(self) -> None:
        self.plans: list[Plan] = []

    def on_plan(self, plan: Plan) -> None:
        self.plans.append(plan)


def test_train_plans_trains_and_resumes_in_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(write_job(tmp_path).parent)
    shown = Shown()
    summary = api.train(profile="cpu", plan_listener=shown, assignments=STEPS)
    (plan,) = shown.plans
    assert plan.profile.name == "cpu"
    assert json.loads(Path("runs/job-cpu/status.json").read_text())["exit_code"] == 0
    resumed = api.train(profile="cpu", target=api.Target(resume=True), assignments=STEPS)
    assert resumed["step"] == summary["step"] == 2
    assert not Path("runs/job-cpu-2").exists()


def test_train_reports_a_folder_that_exists_before_it_reads_the_job(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(InputError, match="--resume"):
        api.train("no-such-job.toml", target=api.Target(tmp_path, "mine"))


def test_plan_has_the_memory_of_the_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(write_job(tmp_path).parent)
    plan = api.plan("rtx3070_8gb", gains=False)
    assert plan.hardware.name == "GeForce RTX 3070"
    assert plan.memory.fits
    assert plan.memory.gains == ()
