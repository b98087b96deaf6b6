"""Decisions on plugins: options that `apply` carries, choices, replaced plugins, and help when memory runs out."""

from pathlib import Path
from typing import Any

import pytest
from applied import Applied

from hwopt.errors import PluginError
from hwopt.planning.plan import Plan
from hwopt.plugin import Context, Decision, Plugin, PluginOptions, Recipe, Relations, Stage
from hwopt.plugin.registry import Registry
from hwopt.plugin.run_view import RunView
from hwopt.testing import plan_for, tiny_job, tiny_profile


class Base(Applied):
    stage = Stage.OPTIMIZER

    class Options(PluginOptions):
        value: int = 0


def plan_with(folder: Path, *plugins: type[Plugin], strict: bool = False, **tables: dict[str, Any]) -> Plan:
    registry = Registry()
    for plugin in plugins:
        registry.add(plugin)
    return plan_for(tiny_profile(**{plugin.name: {} for plugin in plugins}, **tables), tiny_job(folder), registry, strict=strict)


def line(plan: Plan, name: str) -> tuple[str, str]:
    return next((entry.decision, entry.reason) for entry in plan.entries if entry.name == name)


def test_apply_carries_decided_options(tmp_path: Path) -> None:
    class Auto(Base):
        name = "auto"

        def probe(self, context: Context) -> Decision:
            return Decision.apply("as many as there are", self.Options(value=7))

    entry = plan_with(tmp_path, Auto).entries[-1]
    assert (entry.decision, entry.options.model_dump(), entry.choices) == ("apply", {"value": 7}, 1)
    assert entry.plugin.options == entry.options
    assert "instead of 0" in entry.provenance["value"]


@pytest.mark.parametrize("number", [0, 1])
def test_choice_without_two_candidates_is_refused(number: int, tmp_path: Path) -> None:
    class Wrong(Base):
        name = "wrong"

        def probe(self, context: Context) -> Decision:
            return Decision.choose([self.options] * number, "the only ones")

    with pytest.raises(PluginError, match=rf"plugin 'wrong' .*probe\(\) raised TypeError: .* {number} options"):
        plan_with(tmp_path, Wrong)


class Muon(Base):
    name = "muon"
    relations = Relations(replaces=("optimizer",))

    def apply(self, recipe: Recipe, context: Context) -> None:
        recipe.optimizer = sorted


@pytest.mark.parametrize("strict", [False, True])
def test_replaced_plugin_is_skipped_with_the_replacement_in_its_reason(strict: bool, tmp_path: Path) -> None:
    plan = plan_with(tmp_path, Muon, optimizer={"name": "adamw_torch"}, strict=strict)
    assert line(plan, "optimizer") == ("skip", "replaced by plugin 'muon' (a tiny profile)")
    assert line(plan, "muon")[0] == "apply"
    assert plan.recipe.author_of("optimizer") == "plugin 'muon' (a tiny profile)"
    assert plan.recipe.optimizer([2, 1]) == [1, 2]


def test_partly_replaced_plugin_keeps_its_other_fields(tmp_path: Path) -> None:
    class Both(Base):
        name = "both"

        def apply(self, recipe: Recipe, context: Context) -> None:
            recipe.optimizer = len
            recipe.schedule = max

    plan = plan_with(tmp_path, Muon, Both)
    assert line(plan, "both") == ("apply", "always works; recipe.optimizer replaced by plugin 'muon' (a tiny profile)")
    assert plan.recipe.author_of("schedule") == "plugin 'both' (a tiny profile)"


def test_two_plugins_cannot_replace_the_same_field(tmp_path: Path) -> None:
    class Again(Muon):
        name = "again"

    with pytest.raises(PluginError, match=r"recipe.optimizer is set by .*'muon'.* and again by .*'again'"):
        plan_with(tmp_path, Muon, Again)


def test_plugin_that_does_not_set_what_it_replaces_is_refused(tmp_path: Path) -> None:
    class Empty(Base):
        name = "empty"
        relations = Relations(replaces=("optimizer",))

    with pytest.raises(PluginError, match=r"'empty' .* replaces recipe.optimizer, but its apply\(\) does not set it"):
        plan_with(tmp_path, Empty, optimizer={})


class Helper(Base):
    name = "helper"

    def on_oom(self, run: RunView) -> str | None:
        return "helps"


class Silent(Helper):
    name = "silent"
    on_oom = Plugin.on_oom

    def __init__(self, options: Any) -> None:
        raise AssertionError("a plugin that is not asked for is not made")


class Skipped(Helper):
    name = "skipped"

    def probe(self, context: Context) -> Decision:
        return Decision.skip("does not work here")


@pytest.mark.parametrize(("plugin", "helps"), [(Helper, True), (Silent, False), (Skipped, False)])
def test_oom_plugins_are_declared_and_apply_here(plugin: type[Plugin], helps: bool, tmp_path: Path) -> None:
    registry = Registry()
    registry.add(plugin)
    found = plan_for(tiny_profile(), tiny_job(tmp_path), registry).oom_plugins
    assert [each.name for each in found] == ["checkpointing"] + ["helper"] * helps
