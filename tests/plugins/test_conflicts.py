"""Plugins that exclude or need each other are refused at plan time, with both lines of the profile."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from applied import Applied
from event_calls import calling
from plugin_cases import Refused, all_cases

from hwopt.config.profile import load_profile
from hwopt.errors import PluginError
from hwopt.hardware.detect import detect_host, detect_software
from hwopt.hardware.device import described
from hwopt.plugin import Conflict, Context, Plugin, Recipe, Stage, Traits
from hwopt.plugin.registry import Registry
from hwopt.testing import plan_for, tiny_job, tiny_profile

REGISTRY = Registry()
REFUSED = [(name, each) for name, its in all_cases().items() for each in its.conflicts]


def declared() -> list[tuple[str, Conflict]]:
    return [(name, conflict) for name in REGISTRY.names for conflict in REGISTRY.plugin(name).relations.conflicts]


def refusal(case: Refused, folder: Path) -> tuple[str, Path]:
    """The error message for a profile with the tables of `case`, and the path of the profile."""
    profile = folder / "mine.toml"
    profile.write_text(f'name = "mine"\n{case.tables}\n')
    hardware = described("a card", (8, 6), 24.0, detect_host()) if case.on_card else None
    job = tiny_job(folder, "causal-lm")
    software = {**detect_software(), **case.software}
    installed = mock.patch("hwopt.testing.tiny_run.detect_software", return_value=software)
    with installed, pytest.raises(PluginError, match="cannot be used together") as caught:
        plan_for(load_profile(str(profile), {}), job, hardware=hardware, world_size=case.world_size)
    return str(caught.value), profile


def test_every_declared_conflict_is_refused_with_both_lines_of_the_profile(tmp_path: Path) -> None:
    messages = []
    for name, case in REFUSED:
        message, profile = refusal(case, tmp_path)
        lines = profile.read_text().splitlines()
        for plugin in (name, case.other):
            assert f"plugin {plugin!r} ({profile}:{lines.index(f'[plugins.{plugin}]') + 1})" in message, (name, case)
        messages.append(message)
    assert [conflict.why for _, conflict in declared() if not any(conflict.why in message for message in messages)] == []


class Third(Applied):
    """An optimizer plugin of a third party."""

    name = "third"
    stage = Stage.OPTIMIZER

    def apply(self, recipe: Recipe, context: Context) -> None:
        recipe.optimizer = sorted


class Elementwise(Third):
    traits = Traits(elementwise=True)


class PerParameter(Third):
    traits = Traits(per_parameter=True)


class Noise(Third):
    def apply(self, recipe: Recipe, context: Context) -> None:
        recipe.events.append(calling(on_gradients=print))


class Scaled(Third):
    def apply(self, recipe: Recipe, context: Context) -> None:
        recipe.scaler = sorted


ZERO: dict[str, Any] = {"zero": {"stage": 2, "offload": "none"}}
NO_ENGINE: dict[str, Any] = {"zero": {"stage": 0, "offload": "none"}}
IN_BACKWARD: dict[str, Any] = {"optimizer_in_backward": {"clipping": "off"}, "batch": {"train": 8}}


@pytest.mark.parametrize(
    ("plugin", "tables", "lacking"),
    [
        (Third, ZERO, "whole_parameters"),
        (Noise, ZERO, "whole_gradients"),
        (Elementwise, ZERO, None),
        (Noise, NO_ENGINE, None),
        (Third, IN_BACKWARD, "single_update"),
        (Scaled, IN_BACKWARD, "whole_gradients"),
        (PerParameter, IN_BACKWARD, None),
    ],
)
def test_third_party_plugin_conflicts_by_capability(
    plugin: type[Plugin], tables: dict[str, Any], lacking: str | None, tmp_path: Path
) -> None:
    registry = Registry()
    registry.add(plugin)
    profile, job = tiny_profile(third={}, **tables), tiny_job(tmp_path)
    if lacking is None:
        assert {"third", *tables} <= {entry.name for entry in plan_for(profile, job, registry).applied()}
        return
    with pytest.raises(PluginError, match=f"'third' .*'{next(iter(tables))}' .*cannot be used together: .* lacks {lacking}"):
        plan_for(profile, job, registry)


@pytest.mark.parametrize("given", [{}, {"field": "cut", "plugin": "cut"}, {"lacks": "wings"}])
def test_conflict_names_exactly_one_known_target(given: dict[str, str]) -> None:
    with pytest.raises(TypeError, match=r"exactly one of|the capabilities are"):
        Conflict(why="no", **given)


@pytest.mark.parametrize(
    "tables",
    [
        {"precision": {"dtype": "bf16", "level": "O1"}, "zero": {"stage": 2, "offload": "none"}},
        {"fused_loss": {}, "zero": {"stage": 2, "offload": "none"}},
        {"sdpa": {}, "pack": {}},
        {"optimizer": {"name": "adamw_bnb_8bit"}, "zero": {"stage": 0, "offload": "none"}},
    ],
)
def test_compatible_plugins_are_accepted(tables: dict[str, Any], tmp_path: Path) -> None:
    plan = plan_for(tiny_profile(**tables), tiny_job(tmp_path, "causal-lm"))
    assert set(tables) <= {entry.name for entry in plan.applied()}
