"""The settings that `hwopt tune` tries: what plugins offer, and which plans keep the training."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from applied import Applied

from hwopt.hardware.device import Hardware, described
from hwopt.planning.inputs import Inputs
from hwopt.planning.plan import Plan
from hwopt.plugin import Choice, Context, PluginOptions, Recipe, Scale, Stage
from hwopt.plugin.registry import Registry
from hwopt.testing import plan_for, tiny_job, tiny_profile
from hwopt.trials.space import Space
from hwopt.trials.trial import what_runs

CARD = described("a card", (8, 6), 24.0)


class Rows(Applied):
    """Offers another number of rows per optimizer step, which is another training."""

    name = "rows"
    stage = Stage.DATA

    class Options(PluginOptions):
        step: int = 8

    options: Options

    def apply(self, recipe: Recipe, context: Context) -> None:
        recipe.batch["effective"] = self.options.step

    @classmethod
    def alternatives(cls, options: Any | None, context: Context) -> list[Scale]:
        choices = Choice(changes={"step": 8}), Choice(changes={"step": 16})
        return [Scale(choices=choices, present=0, tune=True)]


def space_of(
    folder: Path, hardware: Hardware | None = None, registry: Registry | None = None, **tables: Mapping[str, Any]
) -> Space:
    registry, job = registry or Registry(), tiny_job(folder / "job")
    profile = tiny_profile(**tables)

    def replan(assignments: Sequence[str] = ()) -> Plan:
        return plan_for(Inputs(registry).overridden(profile, assignments), job, registry, hardware=hardware)

    return Space(replan(), registry, replan, folder / "cache", lambda what: None)


def offered(space: Space) -> dict[str, int]:
    """Plugin -> number of its scales."""
    found: dict[str, int] = {}
    for dimension in space.dimensions:
        found[dimension.plugin] = found.get(dimension.plugin, 0) + 1
    return found


def test_applied_plugins_and_those_that_can_be_turned_on_are_offered(tmp_path: Path) -> None:
    space = space_of(tmp_path, CARD, batch={"train": 8, "gradient_accumulation_steps": 4}, dataloader={"num_workers": 2}, sdpa={})
    assert offered(space) == {"batch": 1, "dataloader": 2, "length_batching": 1, "sdpa": 1, "compile": 1}
    start = tuple(axis.start for axis in space.axes)
    assert space.assignments(start) == ()
    assert space.described(start) == "the start"


@pytest.mark.parametrize(
    "table", [{"train": 8, "gradient_accumulation_steps": 4}, {"train": 5, "eval": 40, "effective": 30}, {"train": 7}], ids=str
)
def test_every_micro_batch_keeps_the_rows_of_a_step(table: dict[str, int], tmp_path: Path) -> None:
    space = space_of(tmp_path, batch=table)
    ((number, dimension),) = [(n, d) for n, d in enumerate(space.dimensions) if d.plugin == "batch"]
    start = tuple(axis.start for axis in space.axes)
    rows = []
    for choice in range(len(dimension.scale.choices)):
        plan = space.plan((*start[:number], choice, *start[number + 1 :]))
        assert plan is not None, dimension.described(choice)
        assert plan.batch.step == space.start.batch.step
        assert plan.batch.eval_rows() <= max(4 * plan.batch.train, space.start.batch.eval_rows())
        rows.append(plan.batch.train)
    assert rows == sorted(set(rows))
    assert rows[dimension.scale.present] == space.start.batch.train
    assert (rows[0], rows[-1]) == (1, space.start.batch.step)


def test_setting_with_other_rows_per_step_has_no_plan(tmp_path: Path) -> None:
    registry = Registry()
    registry.add(Rows)
    space = space_of(tmp_path, registry=registry, rows={"step": 8})
    number = next(n for n, dimension in enumerate(space.dimensions) if dimension.plugin == "rows")
    start = tuple(axis.start for axis in space.axes)
    assert space.plan(start) is not None
    assert space.forecast((*start[:number], 1, *start[number + 1 :])) is None


def test_choices_are_described_and_spelled_as_assignments(tmp_path: Path) -> None:
    space = space_of(tmp_path, CARD, batch={"train": 8, "gradient_accumulation_steps": 4}, checkpointing={"layers": "all"})
    setting = [axis.start for axis in space.axes]
    for number, dimension in enumerate(space.dimensions):
        if dimension.plugin in ("batch", "checkpointing"):
            setting[number] = dimension.axis.choices - 1
    found = tuple(setting)
    assert space.described(found) == "checkpointing off, batch.train = 32"
    assert set(space.assignments(found)) == {
        "plugins.batch.train=32", "plugins.batch.gradient_accumulation_steps=1", "plugins.batch.eval=16",
        "plugins.checkpointing.enabled=false"
    }  # fmt: skip
    plan = space.plan(found)
    assert plan.batch.train == 32
    assert "checkpointing" not in {entry.name for entry in plan.applied()}


def test_forecast_tells_equal_plans_by_their_text(tmp_path: Path) -> None:
    """A choice that the machine does not support falls back to what runs already."""
    space = space_of(tmp_path, batch={"train": 4}, compile={"enabled": False})
    start = tuple(axis.start for axis in space.axes)
    number = next(n for n, dimension in enumerate(space.dimensions) if dimension.plugin == "compile")
    compiled = space.plan((*start[:number], 1, *start[number + 1 :]))
    here = space.start.hardware.compiler is not None
    assert (what_runs(compiled) != what_runs(space.start)) == here
