"""Plugins that exclude or need each other are refused at plan time, with both lines of the profile."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from event_calls import calling

from hwopt.config.profile import load_profile
from hwopt.errors import PluginError
from hwopt.hardware.detect import detect_host
from hwopt.hardware.device import described
from hwopt.plugin import CAPABILITIES, Conflict, Context, Decision, Plugin, Recipe, Relations, Stage, Traits
from hwopt.plugin.registry import Registry
from hwopt.testing import plan_for, tiny_job, tiny_profile

REGISTRY = Registry()
DOCS = Path(__file__).parents[2] / "docs" / "conflicts.md"
TABLES: list[tuple[str, str, str]] = [  # (tables of a profile, the plugin that declares the conflict, the other plugin)
    ('[plugins.precision]\ndtype = "bf16"\nlevel = "O2"\n[plugins.zero]\nstage = 2', "precision", "zero"),
    ('[plugins.optimizer]\nname = "paged_adamw_8bit"\n[plugins.zero]\nstage = 2\noffload = "optimizer"', "optimizer", "zero"),
    ('[plugins.optimizer]\nname = "adamw_bnb_8bit"\n[plugins.zero]\nstage = 1\noffload = "none"', "optimizer", "zero"),
    ('[plugins.compile]\nscope = "model"\n[plugins.zero]\nstage = 3', "compile", "zero"),
    ("[plugins.adapter]\nalways = true\n[plugins.quantize]\n[plugins.zero]\nstage = 2", "quantize", "zero"),
    ('[plugins.fused_loss]\n[plugins.zero]\nstage = 3\noffload = "none"', "fused_loss", "zero"),
    ("[plugins.pack]\n[plugins.length_batching]", "pack", "length_batching"),
    ("[plugins.pack]\n[plugins.compile]", "pack", "compile"),
    ('[plugins.sdpa]\n[plugins.pack]\nkernel = "flash"', "pack", "sdpa"),
    ('[plugins.adapter]\nalways = true\nkind = "dora"\n[plugins.quantize]\nbits = 8', "quantize", "adapter"),
    ("[plugins.zero]\nstage = 2\n[plugins.fsdp]", "zero", "fsdp"),
    ('[plugins.precision]\ndtype = "bf16"\nlevel = "O2"\n[plugins.fsdp]', "precision", "fsdp"),
    ('[plugins.optimizer]\nname = "adamw_bnb_8bit"\n[plugins.fsdp]', "optimizer", "fsdp"),
    ('[plugins.optimizer]\nname = "paged_adamw_8bit"\n[plugins.fsdp]', "optimizer", "fsdp"),
    ('[plugins.compile]\nscope = "model"\n[plugins.fsdp]', "compile", "fsdp"),
    ("[plugins.adapter]\nalways = true\n[plugins.quantize]\n[plugins.fsdp]", "quantize", "fsdp"),
    ("[plugins.fused_loss]\n[plugins.fsdp]", "fused_loss", "fsdp"),
    ('[plugins.precision]\ndtype = "bf16"\nlevel = "pure"\n[plugins.zero]\nstage = 2', "precision", "zero"),
    ("[plugins.checkpointing]\noffload = true\n[plugins.compile]", "checkpointing", "compile"),
    (
        '[plugins.precision]\ndtype = "fp16"\n[plugins.optimizer_in_backward]\nclipping = "off"',
        "optimizer_in_backward",
        "precision",
    ),
    ('[plugins.length_batching]\n[plugins.optimizer_in_backward]\nclipping = "off"', "optimizer_in_backward", "length_batching"),
]
ONE_RANK = "plugins.optimizer_in_backward"
"""Skipped with several ranks."""
FOR_A_CARD = {"paged_adamw_8bit", "plugins.compile", "plugins.fsdp", 'dtype = "fp16"'}
"""What would be skipped or replaced on a CPU."""


def declared() -> list[tuple[str, Conflict]]:
    return [(name, conflict) for name in REGISTRY.names for conflict in REGISTRY.plugin(name).relations.conflicts]


def refusal(tables: str, folder: Path) -> tuple[str, Path]:
    """The error message for a profile with these tables, and the path of the profile."""
    profile = folder / "mine.toml"
    profile.write_text(f'name = "mine"\n{tables}\n')
    hardware = described("a card", (8, 6), 24.0, detect_host()) if any(word in tables for word in FOR_A_CARD) else None
    with pytest.raises(PluginError, match="cannot be used together") as caught:
        plan_for(
            load_profile(str(profile), {}),
            tiny_job(folder, "causal-lm"),
            hardware=hardware,
            world_size=1 if ONE_RANK in tables else 2,
        )
    return str(caught.value), profile


@pytest.mark.parametrize(("tables", "name", "other"), TABLES)
def test_conflict_names_both_lines_of_the_profile(tables: str, name: str, other: str, tmp_path: Path) -> None:
    message, profile = refusal(tables, tmp_path)
    lines = profile.read_text().splitlines()
    for plugin in (name, other):
        assert f"plugin {plugin!r} ({profile}:{lines.index(f'[plugins.{plugin}]') + 1})" in message
    assert any(conflict.why in message for conflict in REGISTRY.plugin(name).relations.conflicts)


def test_every_declared_conflict_is_refused(tmp_path: Path) -> None:
    messages = [refusal(tables, tmp_path)[0] for tables, _, _ in TABLES]
    assert [conflict.why for _, conflict in declared() if not any(conflict.why in message for message in messages)] == []


def target(conflict: Conflict) -> str:
    """The target of a conflict as written in docs/conflicts.md."""
    if conflict.lacks is not None:
        return f"an engine without `{conflict.lacks}`"
    return f"`recipe.{conflict.field}`" if conflict.field is not None else f"`{conflict.plugin}`"


def test_every_conflict_has_a_row() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| [^|]+ \| (.+) \|$", DOCS.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(rows) == sorted((name, target(conflict), conflict.why) for name, conflict in declared())


def test_every_capability_has_a_row_with_the_engines_that_lack_it() -> None:
    text = DOCS.read_text(encoding="utf-8")
    for capability, meaning in CAPABILITIES.items():
        assert f"| `{capability}` | {meaning} |" in text


@pytest.mark.parametrize(
    ("name", "options"),
    [("zero", {"stage": 2, "offload": "none"}), ("zero", {"stage": 3, "offload": "parameters"}), ("fsdp", {})],
)
def test_engine_lacks_what_its_plugin_declares(name: str, options: dict[str, Any]) -> None:
    from hwopt.distributed.sharded_engine import ShardedEngine

    plugin_class = REGISTRY.plugin(name)
    lacks = plugin_class(plugin_class.Options(**options)).traits.lacks
    assert set(lacks) <= set(CAPABILITIES)
    assert ("retry" in lacks) == (not ShardedEngine.supports_retry)


class Lion(Plugin):
    """An optimizer plugin of a third party."""

    name = "lion"
    stage = Stage.OPTIMIZER

    def probe(self, context: Context) -> Decision:
        return Decision.apply("always works")

    def apply(self, recipe: Recipe, context: Context) -> None:
        recipe.optimizer = sorted


class ElementwiseLion(Lion):
    traits = Traits(elementwise=True)


class Noise(Lion):
    name = "noise"

    def apply(self, recipe: Recipe, context: Context) -> None:
        recipe.events.append(calling(on_gradients=print))


@pytest.mark.parametrize(("plugin", "lacking"), [(Lion, "whole_parameters"), (Noise, "whole_gradients"), (ElementwiseLion, None)])
def test_third_party_plugin_conflicts_by_capability(plugin: type[Plugin], lacking: str | None, tmp_path: Path) -> None:
    registry = Registry()
    registry.add(plugin)
    profile = tiny_profile(**{plugin.name: {}, "zero": {"stage": 2, "offload": "none"}})
    job = tiny_job(tmp_path)
    if lacking is None:
        assert {"lion", "zero"} <= {entry.name for entry in plan_for(profile, job, registry).applied()}
        return
    with pytest.raises(PluginError, match=f"'{plugin.name}' .*'zero' .*cannot be used together: .* lacks {lacking}"):
        plan_for(profile, job, registry)
    stage_0 = tiny_profile(**{plugin.name: {}, "zero": {"stage": 0, "offload": "none"}})
    assert plugin.name in {entry.name for entry in plan_for(stage_0, job, registry).applied()}, "stage 0 brings no engine"


@pytest.mark.parametrize("given", [{}, {"field": "cut", "plugin": "cut"}, {"lacks": "wings"}])
def test_conflict_names_exactly_one_known_target(given: dict[str, str]) -> None:
    with pytest.raises(TypeError, match=r"exactly one of|the capabilities are"):
        Conflict(why="no", **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "tables",
    [
        {"precision": {"dtype": "bf16", "level": "O1"}, "zero": {"stage": 2, "offload": "none"}},
        {"optimizer": {"name": "adamw_torch"}, "zero": {"stage": 3, "offload": "none"}},
        {"fused_loss": {}, "zero": {"stage": 2, "offload": "none"}},
        {"sdpa": {}, "pack": {}},
        {"group_lengths": {}, "length_batching": {}},
        {"optimizer": {"name": "adamw_bnb_8bit"}, "zero": {"stage": 0, "offload": "none"}},
    ],
)
def test_compatible_plugins_are_accepted(tables: dict[str, Any], tmp_path: Path) -> None:
    plan = plan_for(tiny_profile(**tables), tiny_job(tmp_path, "causal-lm"))
    assert set(tables) <= {entry.name for entry in plan.applied()}


def test_condition_that_raises_is_a_plugin_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Conflict(field="cut", why="never mind", when=lambda mine, theirs: theirs.no_such_option)
    monkeypatch.setattr(REGISTRY.plugin("batch"), "relations", Relations(conflicts=(broken,)))
    with pytest.raises(PluginError, match=r"plugin 'batch' .* raised AttributeError: .*no_such_option"):
        plan_for(tiny_profile(length_batching={}), tiny_job(tmp_path))
