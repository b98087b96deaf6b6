"""Plugins that exclude each other, or need another: refused before anything is built, with both lines of the profile."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hwopt.config.profile import load_profile
from hwopt.errors import PluginError
from hwopt.hardware.detect import detect_host
from hwopt.hardware.device import described
from hwopt.plugin import Conflict
from hwopt.plugin.registry import Registry
from hwopt.testing import plan_for, tiny_job, tiny_profile

REGISTRY = Registry()
DOCS = Path(__file__).parents[2] / "docs" / "conflicts.md"
TABLES: list[tuple[str, str, str]] = [  # (tables of a profile, the plugin that says it, the other one)
    ('[plugins.precision]\ndtype = "bf16"\nlevel = "O2"\n[plugins.zero]\nstage = 2', "zero", "precision"),
    ('[plugins.optimizer]\nname = "paged_adamw_8bit"\n[plugins.zero]\nstage = 2\noffload = "optimizer"', "zero", "optimizer"),
    ('[plugins.optimizer]\nname = "adamw_bnb_8bit"\n[plugins.zero]\nstage = 1\noffload = "none"', "zero", "optimizer"),
    ('[plugins.compile]\nscope = "model"\n[plugins.zero]\nstage = 3', "zero", "compile"),
    ("[plugins.adapter]\nalways = true\n[plugins.quantize]\n[plugins.zero]\nstage = 2", "zero", "quantize"),
    ('[plugins.fused_loss]\n[plugins.zero]\nstage = 3\noffload = "none"', "zero", "fused_loss"),
    ("[plugins.pack]\n[plugins.cut]", "pack", "cut"),
    ("[plugins.pack]\n[plugins.compile]", "pack", "compile"),
    ('[plugins.sdpa]\n[plugins.pack]\nkernel = "flash"', "pack", "sdpa"),
    ('[plugins.adapter]\nalways = true\nkind = "dora"\n[plugins.quantize]\nbits = 8', "quantize", "adapter"),
    ("[plugins.zero]\nstage = 2\n[plugins.fsdp]", "zero", "fsdp"),
    ('[plugins.precision]\ndtype = "bf16"\nlevel = "O2"\n[plugins.fsdp]', "fsdp", "precision"),
    ('[plugins.optimizer]\nname = "adamw_bnb_8bit"\n[plugins.fsdp]', "fsdp", "optimizer"),
    ('[plugins.compile]\nscope = "model"\n[plugins.fsdp]', "fsdp", "compile"),
    ("[plugins.adapter]\nalways = true\n[plugins.quantize]\n[plugins.fsdp]", "fsdp", "quantize"),
    ("[plugins.fused_loss]\n[plugins.fsdp]", "fsdp", "fused_loss"),
]
FOR_A_CARD = {"paged_adamw_8bit", "plugins.compile", "plugins.fsdp"}
"""What would be skipped or replaced on a CPU."""


def declared() -> list[tuple[str, Conflict]]:
    return [(name, conflict) for name in REGISTRY.names for conflict in REGISTRY.plugin(name).conflicts]


@pytest.mark.parametrize(("tables", "name", "other"), TABLES)
def test_refused_with_both_lines(tables: str, name: str, other: str, tmp_path: Path) -> None:
    profile = tmp_path / "mine.toml"
    profile.write_text(f'name = "mine"\n{tables}\n')
    hardware = described("a card", (8, 6), 24.0, detect_host()) if any(word in tables for word in FOR_A_CARD) else None
    with pytest.raises(PluginError, match="cannot be used together") as caught:
        plan_for(load_profile(str(profile), {}), tiny_job(tmp_path, "causal-lm"), hardware=hardware, world_size=2)
    message = str(caught.value)
    lines = profile.read_text().splitlines()
    for plugin in (name, other):
        assert f"plugin {plugin!r} ({profile}:{lines.index(f'[plugins.{plugin}]') + 1})" in message
    conflicts = [conflict for conflict in REGISTRY.plugin(name).conflicts if conflict.other == other]
    assert any(conflict.why in message for conflict in conflicts)


def test_every_conflict_has_a_test_and_a_row() -> None:
    pairs = sorted((name, conflict.other) for name, conflict in declared())
    assert sorted((name, other) for _, name, other in TABLES) == pairs
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| [^|]+ \| (.+) \|$", DOCS.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(rows) == sorted((name, conflict.other, conflict.why) for name, conflict in declared())


@pytest.mark.parametrize(
    "tables",
    [
        {"precision": {"dtype": "bf16", "level": "O1"}, "zero": {"stage": 2, "offload": "none"}},
        {"optimizer": {"name": "adamw_torch"}, "zero": {"stage": 3, "offload": "none"}},
        {"fused_loss": {}, "zero": {"stage": 2, "offload": "none"}},
        {"sdpa": {}, "pack": {}},
        {"group_lengths": {}, "cut": {}},
        {"optimizer": {"name": "adamw_bnb_8bit"}, "zero": {"stage": 0, "offload": "none"}},
    ],
)
def test_what_goes_together(tables: dict[str, Any], tmp_path: Path) -> None:
    plan = plan_for(tiny_profile(**tables), tiny_job(tmp_path, "causal-lm"))
    assert set(tables) <= {entry.name for entry in plan.applied()}


def test_a_condition_that_raises_is_the_plugins_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Conflict("cut", "never mind", when=lambda mine, theirs: theirs.no_such_option)
    monkeypatch.setattr(REGISTRY.plugin("batch"), "conflicts", (broken,))
    with pytest.raises(PluginError, match=r"plugin 'batch' .* raised AttributeError: .*no_such_option"):
        plan_for(tiny_profile(cut={}), tiny_job(tmp_path))
