import os
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from plugin_cases import Cases

from hwopt.errors import PluginError
from hwopt.hardware.detect import detect_host
from hwopt.hardware.device import described
from hwopt.memory.forecast.planner import plan_memory
from hwopt.model.config import load_config
from hwopt.plugin import Context, Recipe
from hwopt.system.cache import cache_folder
from hwopt.testing import TINY_BERT, TINY_LLAMA, plan_for, tiny_job, tiny_profile
from hwopt_plugins.fsdp import Fsdp

CARD = described("a card", (8, 6), 24.0, detect_host())


def planned(folder: Path, ranks: int, kind: str = "causal-lm", hardware: Any = CARD, **tables: Any) -> Any:
    return plan_for(tiny_profile(**tables), tiny_job(folder, kind, samples=64), world_size=ranks, hardware=hardware)


def decision(plan: Any) -> tuple[str, str]:
    return next((entry.decision, entry.reason) for entry in plan.entries if entry.name == "fsdp")


def test_cpu_is_skipped_with_the_reason(tmp_path: Path) -> None:
    kind, reason = decision(planned(tmp_path, 4, hardware=detect_host(), fsdp={}))
    assert kind == "skip"
    assert "needs CUDA devices, found a CPU" in reason


@pytest.mark.parametrize(
    ("ranks", "kind", "expected"),
    [
        (1, "skip", "--processes"),
        (4, "apply", "over 4 ranks; layers gathered for forward and backward, gradients reduced once per micro-batch"),
    ],
)
def test_decision_shows_the_sharding(ranks: int, kind: str, expected: str, tmp_path: Path) -> None:
    found, reason = decision(planned(tmp_path, ranks, fsdp={}))
    assert (found, expected in reason) == (kind, True)


# memory


def parts(folder: Path, ranks: int, **tables: Any) -> Any:
    tables = {"precision": {"dtype": "bf16"}, "optimizer": {"name": "adamw_torch"}} | tables  # its update takes temporary memory
    batch = {"train": 4, "effective": 4 * ranks * tables.pop("accumulation", 1)}
    larger = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4, "num_key_value_heads": 4}
    job = tiny_job(folder, "causal-lm", samples=64, config=TINY_LLAMA | larger)
    plan = plan_for(tiny_profile(batch=batch, **tables), job, world_size=ranks, hardware=CARD)
    memory = plan_memory(plan, cache_folder())
    assert (memory.tier, memory.note) == ("traced", "")
    return memory


def test_memory_of_a_rank_falls_with_the_number_of_ranks(tmp_path: Path) -> None:
    plain = parts(tmp_path, 1, checkpointing={}, accumulation=2)  # all gradients exist after the first backward
    memory = parts(tmp_path, 8, checkpointing={}, accumulation=2, fsdp={})
    for kind in ("weights", "gradients", "optimizer_state"):
        assert memory.parts[kind] == pytest.approx(plain.parts[kind] / 8, rel=0.02), kind
    assert memory.parts["masters"] == 0
    assert memory.peak_gib < plain.peak_gib
    assert memory.eval_peak_gib < plain.eval_peak_gib


def test_unsharded_layers_and_gradients_are_counted(tmp_path: Path) -> None:
    tables = {"optimizer": {}, "accumulation": 2}  # fused: the peak is in the backward pass
    spread = parts(tmp_path, 2, fsdp={}, **tables)
    weights = parts(tmp_path, 2, fsdp={"reshard_after_forward": False}, **tables)
    gradients = parts(tmp_path, 2, fsdp={"reduce": "step"}, **tables)
    layers = 2 * (4 * 256 * 256 + 3 * 256 * 704)
    assert weights.parts["activations"] - spread.parts["activations"] >= layers / 2**30  # two bytes each in bf16, on two ranks
    assert gradients.parts["gradients"] == pytest.approx(2 * spread.parts["gradients"], rel=0.02)


# internals of the engine


def test_environment_does_not_change_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy

    recipe, no_context = Recipe(), cast(Context, None)
    Fsdp(Fsdp.Options()).apply(recipe, no_context)
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")
    monkeypatch.setenv("FSDP_RESHARD_AFTER_FORWARD", "false")
    monkeypatch.delenv("FSDP_CPU_RAM_EFFICIENT_LOADING", raising=False)
    with recipe.process[0]():
        settings = recipe.accelerator["fsdp_plugin"]()
        assert (settings.fsdp_version, settings.reshard_after_forward) == (2, True)
        assert not isinstance(settings.cpu_offload, CPUOffloadPolicy)
        os.environ["ACCELERATE_USE_FSDP"] = "true"  # as Accelerate does
    assert not {"ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING"} & set(os.environ)


@pytest.mark.parametrize(("config", "wanted"), [(TINY_BERT, ["BertLayer"]), (TINY_LLAMA, ["LlamaDecoderLayer"])])
def test_layers_are_gathered_one_at_a_time(config: dict[str, Any], wanted: list[str]) -> None:
    from transformers import AutoModel

    from hwopt_plugins.fsdp.engine import layer_classes

    model = AutoModel.from_config(load_config(None, config))
    assert layer_classes(model) == wanted  # BertEmbeddings is in the same list, but the embedding is sharded separately
    model._no_split_modules = None
    with pytest.raises(PluginError, match="does not name the layers"):
        layer_classes(model)


CASES = Cases(
    whole="tests/integration has mutations on two ranks",
    writes=frozenset({"process", "accelerator", "engine"}),
    hardware=replace(described("a card", (8, 6), 24.0), count=2),
    mutations_in="tests/integration/test_fsdp.py",
)
