"""The ratio reaches the run, the job's own warm-up wins, and evidence compares the live learning rate with its base."""

from types import SimpleNamespace

import pytest
import torch
from plugin_cases import Cases, Mutation

from hwopt.hardware.device import described
from hwopt.plugin import Context, Recipe, verify
from hwopt_plugins.schedule import Schedule, warmup_steps


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
    steps = max(1, warmup_steps(ratio, total))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda at: min(1.0, at / steps))
    for _ in range(step):
        optimizer.step()
        scheduler.step()
    return SimpleNamespace(total_steps=total, optimizer=optimizer, scheduler=scheduler)


def test_apply_sets_the_warmup_ratio():
    plugin, recipe = Schedule(Schedule.Options(warmup_ratio=0.1)), Recipe()
    assert plugin.probe(context()).kind == "apply"
    plugin.apply(recipe, context())
    assert recipe.training == {"warmup_ratio": 0.1}


def test_warmup_of_the_job_overrides_the_plugin():
    for key, value in (("warmup_steps", 0), ("warmup_ratio", 0.1)):
        decision = Schedule(Schedule.Options()).probe(context(**{key: value}))
        assert decision.kind == "apply"
        assert f"overridden by training.{key} = {value} of the job" in decision.reason
        assert "6.0%" in decision.reason


@pytest.mark.parametrize(("ratio", "total", "steps"), [(0.06, 100, 6), (0.06, 101, 7), (0.0, 100, 0), (0.5, 1, 1)])
def test_warmup_steps_round_up(ratio, total, steps):
    assert warmup_steps(ratio, total) == steps


def test_evidence_compares_the_learning_rate_with_the_warmup():
    plugin = Schedule(Schedule.Options())
    assert verify(plugin, run_after(1, 100, 0.06)).status == "active"
    assert "over 6 of 100 steps" in verify(plugin, run_after(40, 100, 0.06)).seen
    assert verify(plugin, run_after(1, 10, 0.06)).status == "active", "the warm-up is over"
    flat = run_after(1, 100, 0.06)
    flat.optimizer.param_groups[0]["lr"] = 2e-5
    assert verify(plugin, flat).status == "inactive"


def constant_rate(patch):
    """torch's scheduler never changes the learning rate."""
    patch.setattr(torch.optim.lr_scheduler.LambdaLR, "get_lr", lambda self: list(self.base_lrs))


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
)
