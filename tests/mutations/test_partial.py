"""Evidence is inactive if an optimization holds for a part of the model only, only for some time, or not on every rank."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hwopt.plugin import Evidence
from hwopt.testing import Recorder, plan_for, tiny_job, tiny_profile, train_tiny
from hwopt.training import evidence
from mutations.parts import PARTIAL, PARTS

FOUR_LAYERS = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}


def plan_of(folder: Path, plugin: str, options: dict[str, Any], steps: int = 1) -> Any:
    job = tiny_job(folder / "data", "causal-lm", config=FOUR_LAYERS, max_steps=steps)
    return plan_for(tiny_profile(**{plugin: options}), job)


def of(found: list[Any], plugin: str) -> Evidence:
    return next(each for entry, each in found if entry.name == plugin)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("what", PARTIAL)
def test_evidence_of_an_optimization_of_a_part_is_inactive(
    what: str, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin, options, patch = PARTIAL[what]
    plan = plan_of(tmp_path, plugin, options)
    patch(monkeypatch, PARTS[part])
    found = of(train_tiny(plan, tmp_path).found, plugin)
    assert found.status == "inactive", found.seen


@pytest.mark.parametrize("what", PARTIAL)
def test_evidence_of_the_whole_model_is_active(what: str, tmp_path: Path) -> None:
    plugin, options, _ = PARTIAL[what]
    found = of(train_tiny(plan_of(tmp_path, plugin, options), tmp_path).found, plugin)
    assert found.status == "active", found.seen


@pytest.mark.parametrize("what", PARTIAL)
def test_evidence_of_an_optimization_that_ends_after_the_first_step_is_inactive(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin, options, patch = PARTIAL[what]

    class Late(Recorder):
        def on_evidence(self, run: Any, found: list[Any]) -> None:
            super().on_evidence(run, found)
            patch(monkeypatch, PARTS["half"])
            for layer in run.inner_model.model.layers[::2] if plugin == "checkpointing" else ():
                layer.gradient_checkpointing = False  # `checkpoint` is bound already

    recorder = train_tiny(plan_of(tmp_path, plugin, options, steps=2), tmp_path, Late())
    assert of(recorder.found, plugin).status == "active"
    assert of(recorder.found_at_end, plugin).status == "inactive"
    assert any(f"plugin '{plugin}' was active after the first step and is not any more" in text for text in recorder.warnings)


def test_fallen_out_modules_are_named_with_both_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin, options, patch = PARTIAL["linear layers in fp32"]
    plan = plan_of(tmp_path, plugin, options)
    patch(monkeypatch, lambda number: number in (1, 2, 3, 8))
    seen = of(train_tiny(plan, tmp_path).found, plugin).seen
    assert "4 of 29 linear layers computed in fp32: " in seen
    assert "model.layers.0.self_attn.k_proj, model.layers.0.self_attn.v_proj, model.layers.0.self_attn.o_proj and 1 more" in seen


def test_evidence_that_is_inactive_on_another_rank_is_inactive(monkeypatch: pytest.MonkeyPatch) -> None:
    import accelerate.utils

    entry: Any = SimpleNamespace(name="a")
    ranks = [[Evidence.active("on")], [Evidence.inactive("2 of 8 layers")]]
    monkeypatch.setattr(accelerate.utils, "gather_object", lambda own: ranks)
    (_, found), *_ = evidence.worst_of_ranks([(entry, Evidence.active("on"))], 0)
    assert (found.status, found.seen) == ("inactive", "on rank 1: 2 of 8 layers")
    (_, found), *_ = evidence.worst_of_ranks([(entry, ranks[1][0])], 1)
    assert found.seen == "2 of 8 layers"
