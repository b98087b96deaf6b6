"""Garbage is collected rarely while a command starts, and as usual while a run trains."""

import gc
from pathlib import Path

from event_calls import calling

from hwopt.system import garbage
from hwopt.testing import plan_for, tiny_job, tiny_profile, train_tiny


def test_training_collects_as_usual(tmp_path: Path) -> None:
    before, seen = gc.get_threshold(), []
    plan = plan_for(tiny_profile(), tiny_job(tmp_path / "data", max_steps=1))
    plan.recipe.events.append(calling(on_step_begin=lambda run: seen.append(gc.get_threshold())))
    try:
        garbage.collect_seldom()
        assert gc.get_threshold() == garbage.STARTING
        train_tiny(plan, tmp_path)
        assert seen == [garbage.USUAL]
    finally:
        gc.set_threshold(*before)
