"""Profiles for models that do not fit whole: a real CUDA device, its memory limited to the card's size."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from pretend_cuda.counters import on_pretend_card
from pretend_cuda.profile_cases import MAY_BE_INACTIVE

from hwopt import api
from hwopt.hardware.device import GIB
from hwopt.testing import Recorder, write_samples

pytestmark = pytest.mark.device("any")

Limit = Callable[[float], AbstractContextManager[None]]

LLAMA_1B: dict[str, Any] = {  # as TinyLlama-1.1B
    "model_type": "llama",
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "num_hidden_layers": 22,
    "intermediate_size": 5632,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
}
LLAMA_7B = LLAMA_1B | {  # as Llama-2-7B
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "intermediate_size": 11_008,
    "num_key_value_heads": 32,
}
ON_PRETEND_CARD = {"num_hidden_layers": 2, "vocab_size": 8000}
"""The host holds the card's memory, and updates the weights for ZeRO: 18 bytes a parameter, and minutes."""
CARDS = {"rtx3070_8gb_zero": (8, LLAMA_1B), "t4_16gb_zero": (16, LLAMA_1B), "rtx3070_8gb_qlora": (8, LLAMA_7B)}


@pytest.mark.parametrize("profile", CARDS)
def test_large_decoder_fits_as_forecast(
    profile: str, tmp_path: Path, limited_to: Limit, memory_limit: Callable[[float], str | None]
) -> None:
    """Steps of full rows: what the plan says of their peak holds, and every plugin is on."""
    if "zero" in profile and find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    gib, config = CARDS[profile]
    small = ["plugins.adapter.always=true"] if "qlora" in profile else []
    if on_pretend_card():
        config = config | ON_PRETEND_CARD
    write_samples(tmp_path / "train.jsonl", 400)
    table = ", ".join(f"{key} = {json.dumps(value)}" for key, value in config.items())
    given = [
        f"model.config={{ {table} }}",
        f"data.train={tmp_path / 'train.jsonl'}",
        "data.max_length=512",
        "task.kind=causal-lm",
        "training.max_steps=4",
        "training.logging_steps=1",
        "training.learning_rate=1e-4",
        "training.save_steps=100",
        *small,
    ]
    with limited_to(gib):
        plan = api.resolve(profile, assignments=given, cache=tmp_path / "cache", memory_limit=memory_limit(gib))
        heard = Recorder()
        api.execute(plan, tmp_path / "run", heard, cache=tmp_path / "cache")
        peak = torch.cuda.max_memory_allocated() / GIB
    assert peak <= gib
    assert plan.memory is None or peak <= 1.1 * plan.memory.peak_gib
    found = {entry.name: evidence for entry, evidence in heard.found}
    unread = MAY_BE_INACTIVE if on_pretend_card() else {"tf32"}
    assert {name for name, evidence in found.items() if evidence.status == "inactive"} <= unread, found
    assert {"zero" if "zero" in profile else "quantize", "precision", "checkpointing"} <= {
        name for name, evidence in found.items() if evidence.status == "active"
    }
    assert on_pretend_card() or heard.losses[-1] < heard.losses[0]  # a pretend card computes no losses of large models
