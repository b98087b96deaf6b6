"""The ratio reaches the run, the job's own warm-up wins, and a rate that does not follow the schedule is found out."""

from types import SimpleNamespace

import pytest
import torch
from plugin_cases import Cases, Mutation, Part

from hwopt.hardware.device import described
from hwopt.plugin import Context
from hwopt.testing import plan_for, tiny_job, tiny_profile, train_tiny
from hwopt_plugins.schedule import Schedule


def context(**training):
    return Context(
        described("CPU", None, 32.0),
        {},
        None,
        SimpleNamespace(training=SimpleNamespace(**{"warmup_steps": None, "warmup_ratio": None, **training})),
    )


def test_warmup_of_the_job_overrides_the_plugin():
    decision = Schedule(Schedule.Options()).probe(context(warmup_steps=0))
    assert decision.kind == "apply"
    assert "overridden by training.warmup_steps = 0 of the job" in decision.reason


ASKED = [
    ({"max_steps": 20}, "active", "warm-up over 2 of 20 steps"),
    ({"warmup_steps": 0}, "active", "warm-up over 0 of 2 steps"),
    ({"lr_scheduler_type": "constant"}, "unknown", "this schedule has one rate"),
    ({"max_steps": 1}, "unknown", ""),
]


@pytest.mark.parametrize(("asked", "status", "seen"), ASKED)
def test_evidence_knows_the_warmup_that_the_job_leaves(asked, status, seen, tmp_path):
    recorder = train_tiny(plan_for(tiny_profile(schedule={}), tiny_job(tmp_path / "data", **{"max_steps": 2} | asked)), tmp_path)
    evidence = {entry.name: evidence for entry, evidence in recorder.found}["schedule"]
    assert (evidence.status, seen in evidence.seen) == (status, True), evidence.seen
    assert recorder.found_at_end[-1][1].status == status, "the warm-up is over"


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
