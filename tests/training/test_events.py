"""Events: when each one fires, and what it receives."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from event_calls import calling

from hwopt.planning.plan import Plan
from hwopt.plugin.run_view import EVENTS
from hwopt.saving.reader import load_checkpoint
from hwopt.testing import plan_for, tiny_job, tiny_profile, train_tiny


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
