"""The ratio reaches the run, the job's own warm-up wins, and evidence compares the live learning rate with its base."""

import math
from types import SimpleNamespace

import pytest
import torch
from plugin_cases import Cases, Mutation, Part

from hwopt.hardware.device import described
from hwopt.plugin import Context, verify
from hwopt.testing import plan_for, tiny_job, tiny_profile, train_tiny
from hwopt_plugins.schedule import Schedule


def context(**training):
    return Context(
        described("CPU", None, 32.0),
        {},
        None,
        SimpleNamespace(training=SimpleNamespace(**{"warmup_steps": None, "warmup_ratio": None, **training})),
    )


def run_after(step, total, ratio):
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([parameter], lr=2e-5)
    steps = max(1, math.ceil(ratio * total))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda at: min(1.0, at / steps))
    for _ in range(step):
        optimizer.step()
        scheduler.step()
    return SimpleNamespace(total_steps=total, optimizer=optimizer, scheduler=scheduler)


def test_warmup_of_the_job_overrides_the_plugin():
    decision = Schedule(Schedule.Options()).probe(context(warmup_steps=0))
    assert decision.kind == "apply"
    assert "overridden by training.warmup_steps = 0 of the job" in decision.reason


def test_evidence_compares_the_learning_rate_with_the_warmup():
    plugin = Schedule(Schedule.Options())
    assert verify(plugin, run_after(1, 100, 0.06)).status == "active"
    assert "over 6 of 100 steps" in verify(plugin, run_after(40, 100, 0.06)).seen
    assert verify(plugin, run_after(1, 10, 0.06)).status == "active", "the warm-up is over"
    flat = run_after(1, 100, 0.06)
    flat.optimizer.param_groups[0]["lr"] = 2e-5
    assert verify(plugin, flat).status == "inactive"


ASKED = [({"warmup_steps": 0}, "active"), ({"lr_scheduler_type": "constant"}, "unknown"), ({"max_steps": 1}, "unknown")]


@pytest.mark.parametrize(("asked", "status"), ASKED)
def test_job_without_a_warmup_is_not_inactive(asked, status, tmp_path):
    found = train_tiny(
        plan_for(tiny_profile(schedule={}), tiny_job(tmp_path / "data", **{"max_steps": 2} | asked)), tmp_path
    ).found
    assert {entry.name: evidence.status for entry, evidence in found}["schedule"] == status


def constant_rate(patch):
    """torch's scheduler never changes the learning rate."""
    patch.setattr(torch.optim.lr_scheduler.LambdaLR, "get_lr", lambda self: list(self.base_lrs))


def constant_groups(patch, chosen):
    """torch's scheduler never changes the learning rate of the chosen groups of weights."""
    real = torch.optim.lr_scheduler.LambdaLR.get_lr

    def rates(self):
        return [
            base if chosen(number) else rate for number, (base, rate) in enumerate(zip(self.base_lrs, real(self), strict=True))
        ]

    patch.setattr(torch.optim.lr_scheduler.LambdaLR, "get_lr", rates)


def no_warmup(patch):
    """The loop asks for a schedule without a warm-up."""
    patch.setattr("hwopt.training.optimizer.warmup_steps", lambda *_: 0)


HALF, FOUR_STEPS = {"warmup_ratio": 0.5}, {"max_steps": 4}
CASES = Cases(
    options=HALF,
    writes=frozenset({"training"}),
    mutations=(
        Mutation("the rate is constant", constant_rate, "the schedule asks for", HALF, FOUR_STEPS),
        Mutation("no warm-up", no_warmup, "expected warmup True", HALF, FOUR_STEPS),
    ),
    parts=(Part("constant rate", constant_groups, HALF),),
)
