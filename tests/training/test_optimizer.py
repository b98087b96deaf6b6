"""Parameter groups, and the names under which optimizer state is saved."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from applied import Applied
from hypothesis import given
from hypothesis import strategies as st
from transformers import get_linear_schedule_with_warmup, get_scheduler

from hwopt import api
from hwopt.config.job_training import Training
from hwopt.errors import InputError, PluginError
from hwopt.planning.plan import Plan
from hwopt.plugin import Context, Plugin, Recipe, RunView, Stage
from hwopt.plugin.registry import Registry
from hwopt.saving.reader import load_checkpoint
from hwopt.testing import Recorder, plan_for, rewound, saved_bits, tiny_job, tiny_profile, train_tiny
from hwopt.training.optimizer import decay_groups, linear_factor


def regrouped(optimizer: Any, run: RunView) -> Any:
    """`optimizer` with one group per parameter dimension, in reverse order."""
    settings = {key: value for key, value in optimizer.param_groups[0].items() if key not in ("params", "param_names")}
    parameters = [parameter for group in optimizer.param_groups for parameter in reversed(group["params"])]
    optimizer.param_groups = [
        settings | {"params": [parameter for parameter in parameters if parameter.ndim == dim]} for dim in (1, 2)
    ]
    return optimizer


class Regroup(Applied):
    name = "regroup"
    stage = Stage.OPTIMIZER

    def apply(self, recipe: Recipe, context: Context) -> None:
        recipe.optimizer_wraps.append(regrouped)


class OneRate(Applied):
    """Biases learn at ten times the rate."""

    name = "one_rate"
    stage = Stage.OPTIMIZER
    _dropped = ""

    def apply(self, recipe: Recipe, context: Context) -> None:
        recipe.parameter_groups = type(self).groups

    @classmethod
    def groups(cls, named: Any, training: Any) -> list[dict[str, Any]]:
        biases = [(name, p) for name, p in named if name.endswith("bias") and name != cls._dropped]
        others = [(name, p) for name, p in named if not name.endswith("bias")]
        return [{"params": biases, "lr": 10 * training.learning_rate}, {"params": others}]


def planned(folder: Path, *plugins: type[Plugin], tables: dict[str, Any] | None = None, **training: Any) -> Plan:
    registry = Registry()
    for plugin in plugins:
        registry.add(plugin)
    job = tiny_job(folder / "data", **({"max_steps": 4, "save_steps": 2} | training))
    return plan_for(tiny_profile(**(tables or {}), **{plugin.name: {} for plugin in plugins}), job, registry)


@pytest.mark.parametrize("precision", [{}, {"precision": {"dtype": "bf16", "level": "O2"}}], ids=["fp32", "O2"])
def test_state_is_saved_under_the_names_of_the_final_optimizer(precision: dict[str, Any], tmp_path: Path) -> None:
    """Regrouping changes the order of parameters, not their names. fp32 masters have the names of their weights."""
    plan = planned(tmp_path, Regroup, tables=precision)
    run = train_tiny(plan, tmp_path).run
    checkpoint = load_checkpoint(tmp_path / "run" / "checkpoint-4")
    shapes = {name: p.shape for name, p in run.inner_model.named_parameters()}
    saved = checkpoint.state["engine"]
    assert saved["parameters"].keys() == shapes.keys()
    for name, shape in shapes.items():
        assert saved["parameters"][name].shape == shape, name
        assert saved["optimizer"]["states"][name]["exp_avg"].shape == shape, name
    again = rewound(tmp_path / "run", tmp_path / "again", 2)
    api.execute(planned(tmp_path, Regroup, tables=precision), again, cache=tmp_path / "cache", resume=True)
    assert saved_bits(again / "final") == saved_bits(tmp_path / "run" / "final")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("cosine_with_min_lr", {"min_lr_rate": 0.2}),
        ("cosine_with_min_lr", {"min_lr": 1e-5}),
        ("polynomial", {"lr_end": 1e-5}),
        ("warmup_stable_decay", {"num_decay_steps": 2, "decay_type": "linear"}),
    ],
)
def test_schedule_with_options_is_that_of_transformers(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    """At another rate than torch's default one."""
    plan = planned(tmp_path, warmup_steps=1, learning_rate=2e-5, lr_scheduler_type=name, lr_scheduler_kwargs=options)
    run = train_tiny(plan, tmp_path).run
    theirs = get_scheduler(name, torch.optim.SGD([torch.zeros(1)], lr=2e-5), 1, 4, options)
    assert [run.scheduler.lr_lambdas[0](step) for step in range(5)] == [theirs.lr_lambdas[0](step) for step in range(5)]


@pytest.mark.parametrize("warmup", [0, 1])
def test_run_without_a_learning_rate_is_warned_of(warmup: int, tmp_path: Path) -> None:
    found = train_tiny(planned(tmp_path, warmup_steps=warmup, max_steps=1, save_steps=1), tmp_path).warnings
    assert any("The learning rate is 0 in all 1 step(s)" in text for text in found) == bool(warmup)


def test_decay_longer_than_the_run_is_refused(tmp_path: Path) -> None:
    options = {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 4}}
    with pytest.raises(InputError, match="1 steps of warm-up and 4 of decay are more than the 4"):
        train_tiny(planned(tmp_path, warmup_steps=1, **options), tmp_path)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"lr_scheduler_kwargs": {"min_lr": 0}}, "linear does not know min_lr; it has no options"),
        ({"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"power": 2}}, "does not know power; its options are num_cycles"),
        ({"lr_scheduler_type": "cosine_with_min_lr"}, "needs lr_scheduler_kwargs = { min_lr_rate = … }, or min_lr"),
    ],
)
def test_options_that_a_schedule_does_not_have_are_refused(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Training.model_validate(table)


def test_plugin_sets_the_parameter_groups(tmp_path: Path) -> None:
    plan = planned(tmp_path, OneRate, learning_rate=1e-3, lr_scheduler_type="constant")
    run = train_tiny(plan, tmp_path).run
    fast, rest = run.optimizer.param_groups
    assert (fast["lr"], rest["lr"]) == (1e-2, 1e-3)
    assert all(name.endswith("bias") for name in fast["param_names"])
    assert fast["betas"] == rest["betas"] == (0.9, 0.999), "missing keys are filled in from the job"
    assert run.parameter_names == fast["param_names"] + rest["param_names"]


def test_parameter_without_a_group_is_refused(tmp_path: Path) -> None:
    class Forgetful(OneRate):
        name = "forgetful"
        _dropped = "classifier.bias"

    with pytest.raises(PluginError, match=r"plugin 'forgetful'.*exactly one group; see classifier\.bias"):
        train_tiny(planned(tmp_path, Forgetful), tmp_path)


def test_optimizer_of_unknown_tensors_is_refused(tmp_path: Path) -> None:
    class Foreign(Regroup):
        name = "foreign"

        def apply(self, recipe: Recipe, context: Context) -> None:
            recipe.optimizer_wraps.append(lambda optimizer, run: torch.optim.SGD([torch.zeros(2, requires_grad=True)]))

    with pytest.raises(PluginError, match="1 tensors that are not parameters of the model"):
        train_tiny(planned(tmp_path, Foreign), tmp_path)


def test_weight_decay_skips_biases_and_norms(tmp_path: Path) -> None:
    recorder = Recorder()
    api.execute(planned(tmp_path, weight_decay=0.1), tmp_path / "run", recorder, cache=tmp_path / "cache")
    decayed, plain = recorder.run.optimizer.param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert {p.ndim for p in plain["params"]} == {1}
    assert decay_groups([("x", torch.zeros(2))], recorder.run.training)[0]["params"] == []


@given(st.integers(0, 50), st.integers(1, 100), st.integers(0, 120))
def test_linear_schedule_is_that_of_transformers(warmup: int, total: int, step: int) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    (theirs,) = get_linear_schedule_with_warmup(optimizer, warmup, total).lr_lambdas
    assert linear_factor(warmup, total, step) == theirs(step)
