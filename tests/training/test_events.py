"""Events: when each one fires, and what it receives."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from event_calls import calling

from hwopt import api
from hwopt.planning.plan import Plan
from hwopt.plugin.run_view import EVENTS
from hwopt.saving.reader import load_checkpoint
from hwopt.testing import plan_for, rewound, tiny_job, tiny_profile, train_tiny


def planned(folder: Path, tables: dict[str, Any] | None = None, **training: Any) -> Plan:
    job = tiny_job(folder / "data", **({"max_steps": 4, "eval_steps": 2, "save_steps": 2} | training))
    return plan_for(tiny_profile(**(tables or {})), job)


def test_events_fire_in_the_documented_order(tmp_path: Path) -> None:
    plan, fired = planned(tmp_path), []
    for name in EVENTS:
        plan.recipe.events.append(calling(**{name: lambda *_, name=name: fired.append(name)}))
    train_tiny(plan, tmp_path)
    preflight, steps = fired[:2], fired[2:]
    assert preflight == ["on_evaluate_begin", "on_evaluate_end"]
    step = ["on_step_begin", "on_gradients", "on_step_end"]
    assert [name for name in steps if name != "on_saved"] == 2 * [*step, *step, "on_evaluate_begin", "on_evaluate_end"]
    assert Counter(steps)["on_saved"] >= 3, "two checkpoints and the best weights"


def test_gradients_event_sees_named_unscaled_unclipped_gradients(tmp_path: Path) -> None:
    """With a loss scale of 65,536 the event sees the gradients of fp32 training, up to rounding."""
    seen: dict[str, dict[str, torch.Tensor]] = {}
    for dtype, level in (("fp32", "O1"), ("fp16", "O2")):
        plan = planned(tmp_path, {"precision": {"dtype": dtype, "level": level}}, max_steps=1, max_grad_norm=1e-3)
        if dtype == "fp16":  # a CPU plan has no fp16, so the test uses the recipe of a card
            plan = with_fp16(plan)
        found = seen.setdefault(dtype, {})
        plan.recipe.events.append(
            calling(on_gradients=lambda run, found=found: found.update((n, g.clone()) for n, g in run.engine.gradients()))
        )
        train_tiny(plan, tmp_path / dtype)
    assert seen["fp32"].keys() == seen["fp16"].keys()
    ours, theirs = (torch.cat([seen[dtype][name].flatten() for name in sorted(seen["fp32"])]) for dtype in ("fp16", "fp32"))
    assert theirs.norm() > 1e-2, "not clipped to max_grad_norm yet"
    assert (ours - theirs).norm() / theirs.norm() < 2e-2


def with_fp16(plan: Plan) -> Plan:
    from dataclasses import replace

    from hwopt.plugin import Recipe
    from hwopt_plugins.precision import Precision

    recipe = Recipe()
    for entry in plan.applied():
        plugin = Precision(Precision.Options(dtype="fp16", level="O2")) if entry.name == "precision" else entry.plugin
        with recipe.written_by(entry.author):
            plugin.apply(recipe, plan.context)
    return replace(plan, recipe=recipe)


def test_step_end_reports_whether_the_update_was_applied(tmp_path: Path) -> None:
    plan, applied = planned(tmp_path, on_nonfinite="skip"), []

    def poison(run: Any) -> None:
        if run.step == 1:
            next(gradient for _, gradient in run.engine.gradients()).fill_(math.inf)

    def look(run: Any, update_applied: torch.Tensor) -> None:
        assert run.progress.between_steps is False, "what the event changes belongs to the step"
        applied.append((run.step, bool(update_applied)))

    plan.recipe.events.append(calling(on_gradients=poison))
    plan.recipe.events.append(calling(on_step_end=look))
    train_tiny(plan, tmp_path)
    assert applied == [(1, True), (2, False), (3, True), (4, True)]


def test_resume_fires_step_events_only_for_new_steps(tmp_path: Path) -> None:
    train_tiny(planned(tmp_path), tmp_path)
    again, plan, ended = rewound(tmp_path / "run", tmp_path / "again", 2), planned(tmp_path), []
    plan.recipe.events.append(calling(on_step_end=lambda run, applied: ended.append(run.step)))
    api.execute(plan, again, cache=tmp_path / "cache", resume=True)
    assert ended == [3, 4]


class Average:
    """An average of the weights, as an EMA plugin keeps it."""

    def __init__(self) -> None:
        self.shadow: dict[str, torch.Tensor] = {}

    def step_end(self, run: Any, applied: torch.Tensor) -> None:
        for name, parameter in zip(run.engine.names, run.engine.parameters, strict=True):
            self.shadow[name] = (self.shadow.get(name, 0.0) + parameter.detach()) / 2

    def final(self, model: Any, run: Any) -> Any:
        model.load_state_dict({**model.state_dict(), **self.shadow})
        return model

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = {name: tensor.clone() for name, tensor in state["shadow"].items()}


@pytest.mark.parametrize("resumed", [False, True])
def test_final_holds_the_plugin_state_of_the_best_step(resumed: bool, tmp_path: Path) -> None:
    """The learning rate ruins the model late: final/ holds the averaged weights of the best evaluation."""
    from safetensors.torch import load_file

    averages: dict[int, dict[str, torch.Tensor]] = {}

    def averaging() -> Plan:
        plan, average = planned(tmp_path, learning_rate=0.5, eval_steps=1, lr_scheduler_type="constant", max_steps=6), Average()
        plan.recipe.state.append(average)
        plan.recipe.events.append(calling(on_step_end=average.step_end))
        plan.recipe.events.append(calling(on_step_end=lambda run, _: averages.update({run.step: dict(average.shadow)})))
        plan.recipe.final_steps.append(average.final)
        return plan

    recorder = train_tiny(averaging(), tmp_path)
    run = tmp_path / "run"
    if resumed:
        run = rewound(run, tmp_path / "again", 4)
        api.execute(averaging(), run, cache=tmp_path / "cache", resume=True)
    losses = {int(row["step"]): row["eval_f1"] for row in recorder.rows if "eval_f1" in row}
    best = max(losses, key=lambda step: (losses[step], -step))
    assert best < 6, "the test needs a best step before the last one"
    saved = load_file(run / "final" / "model.safetensors")
    assert all(torch.equal(saved[name], tensor) for name, tensor in averages[best].items())


def test_saved_fires_when_the_folder_is_complete(tmp_path: Path) -> None:
    plan, saved = planned(tmp_path), []

    def look(run: Any, folder: Path) -> None:
        saved.append(folder.name)
        if folder.name.startswith("checkpoint"):
            assert load_checkpoint(folder).step == int(folder.name.rpartition("-")[2])

    plan.recipe.events.append(calling(on_saved=look))
    train_tiny(plan, tmp_path)
    assert [name for name in saved if name.startswith("checkpoint")] == ["checkpoint-2", "checkpoint-4"]
    assert [name for name in saved if name.startswith("best")]
