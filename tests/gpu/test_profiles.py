"""Profiles end to end on a CUDA device, its memory limited to their card's size."""

import gc
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from pretend_cuda.counters import on_pretend_card
from pretend_cuda.profile_cases import GEMMA, LLAMA, MAY_BE_INACTIVE

from hwopt import api
from hwopt.errors import DoesNotFitError
from hwopt.hardware.device import GIB
from hwopt.memory.forecast.planner import plan_memory
from hwopt.testing import Recorder, write_samples

pytestmark = pytest.mark.device("any")

Limit = Callable[[float], AbstractContextManager[None]]

BERT_BASE = {"model_type": "bert", "vocab_size": 2000}
LLAMA_7B: dict[str, Any] = LLAMA | {"hidden_size": 4096, "intermediate_size": 11_008, "num_key_value_heads": 32}
if on_pretend_card():  # the host holds the card's memory, and updates the weights for ZeRO: 18 bytes a parameter, and minutes
    LLAMA_1B: dict[str, Any] = LLAMA | {"vocab_size": 8000}
    LLAMA_7B |= {"vocab_size": 8000}
else:  # all layers
    GEMMA, LLAMA_1B = GEMMA | {"num_hidden_layers": 26}, LLAMA | {"num_hidden_layers": 22}
    LLAMA_7B |= {"num_hidden_layers": 32}
CARDS: dict[str, tuple[int, dict[str, Any], set[str]]] = {
    "rtx3070_8gb": (8, BERT_BASE, {"precision"}),
    "rtx3090_24gb": (24, GEMMA, {"precision"}),
    "t4_16gb": (16, BERT_BASE, {"precision"}),
    "rtx3070_8gb_zero": (8, LLAMA_1B, {"zero", "precision", "checkpointing"}),
    "t4_16gb_zero": (16, LLAMA_1B, {"zero", "precision", "checkpointing"}),
    "rtx3070_8gb_qlora": (8, LLAMA_7B, {"quantize", "precision", "checkpointing"}),
}
"""Profile -> memory of its card, model, and plugins that must be active."""


def assignments(folder: Path, config: dict[str, Any], *more: str) -> list[str]:
    write_samples(folder / "train.jsonl", 600)
    write_samples(folder / "eval.jsonl", 100, seed=1)
    table = ", ".join(f"{key} = {json.dumps(value)}" for key, value in config.items())
    return [
        f"model.config={{ {table} }}",
        f"data.train={folder / 'train.jsonl'}",
        f"data.eval={folder / 'eval.jsonl'}",
        "data.max_length=128",
        "training.num_train_epochs=2",
        "training.logging_steps=1",
        "training.learning_rate=1e-4",
        *more,
    ]


@pytest.mark.parametrize("profile", CARDS)
def test_profile_trains_in_the_cards_memory_as_forecast(
    profile: str, tmp_path: Path, limited_to: Limit, memory_limit: Callable[[float], str | None]
) -> None:
    if "zero" in profile and find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    gib, config, proven = CARDS[profile]
    more = []
    if config["model_type"] == "llama":  # steps of full rows
        more = ["data.max_length=512", "task.kind=causal-lm", "training.max_steps=4", "training.save_steps=100"]
    if "qlora" in profile:
        more.append("plugins.adapter.always=true")
    gc.collect()
    with limited_to(gib):
        before = torch.cuda.memory_allocated()  # DeepSpeed keeps tensors of an earlier test
        given = assignments(tmp_path, config, *more)
        plan = api.resolve(profile, assignments=given, cache=tmp_path / "cache", memory_limit=memory_limit(gib))
        assert plan.hardware.device_type == "cuda"
        forecast = plan_memory(plan, tmp_path / "cache")
        heard = Recorder()
        api.execute(plan, tmp_path / "run", heard, cache=tmp_path / "cache")
        peak = (torch.cuda.max_memory_allocated() - before) / GIB
    assert peak <= min(gib, 1.1 * forecast.highest_gib)
    found = {entry.name: evidence.status for entry, evidence in heard.found}
    unread = MAY_BE_INACTIVE if on_pretend_card() else set()
    assert {name for name, status in found.items() if status == "inactive"} <= unread, found
    assert proven <= {name for name, status in found.items() if status == "active"}
    assert (tmp_path / "run" / "final" / "model.safetensors").is_file()


def test_run_recovers_from_real_oom(tmp_path: Path, limited_to: Limit) -> None:
    """A micro-batch far over the limit, in training and in evaluation: the run ends well, with no step lost."""
    given = [
        *assignments(tmp_path, BERT_BASE),
        "plugins.batch.train=512",
        "plugins.batch.eval=600",
        "plugins.batch.gradient_accumulation_steps=1",
    ]
    with limited_to(4):
        plan = api.resolve("rtx3070_8gb", assignments=given, cache=tmp_path / "cache")
        heard = Recorder()
        api.execute(plan, tmp_path / "run", heard, cache=tmp_path / "cache")
    assert any("Training ran out of memory" in warning for warning in heard.warnings)
    assert heard.run.step == heard.run.total_steps


def test_oom_in_evaluation_does_not_change_training(tmp_path: Path, limited_to: Limit) -> None:
    given = [*assignments(tmp_path, BERT_BASE), "plugins.batch.train=4", "plugins.batch.eval=100000", "data.max_length=512"]
    with limited_to(3):
        plan = api.resolve("rtx3070_8gb", assignments=given, cache=tmp_path / "cache")
        heard = Recorder()
        api.execute(plan, tmp_path / "run", heard, cache=tmp_path / "cache")
    assert not any("Training ran out of memory" in warning for warning in heard.warnings)
    assert heard.run.step == heard.run.total_steps


def test_automatic_batch_fits_and_has_at_least_32_rows(
    tmp_path: Path, limited_to: Limit, memory_limit: Callable[[float], str | None]
) -> None:
    given = [*assignments(tmp_path, BERT_BASE), "plugins.batch.train=auto", "plugins.batch.effective=512"]
    with limited_to(8):
        plan = api.resolve("rtx3070_8gb", assignments=given, cache=tmp_path / "cache", memory_limit=memory_limit(8))
        heard = Recorder()
        api.execute(plan, tmp_path / "run", heard, cache=tmp_path / "cache")
    assert plan.batch.train >= 32
    assert not any("out of memory" in warning for warning in heard.warnings)


def test_model_that_never_fits_is_reported(tmp_path: Path, limited_to: Limit) -> None:
    given = [*assignments(tmp_path, GEMMA), "plugins.adapter.enabled=false"]
    with limited_to(2):
        plan = api.resolve("rtx3090_24gb", assignments=given, cache=tmp_path / "cache")
        with pytest.raises(DoesNotFitError):
            api.execute(plan, tmp_path / "run", cache=tmp_path / "cache")
