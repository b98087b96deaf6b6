"""The seeds' three profiles end to end on a real CUDA device, its memory limited to their card's size."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from pretend_cuda.counters import on_pretend_card

from hwopt import api
from hwopt.errors import DoesNotFitError
from hwopt.hardware.device import GIB
from hwopt.testing import Recorder, write_samples

pytestmark = pytest.mark.device("any")

Limit = Callable[[float], AbstractContextManager[None]]

BERT_BASE = {"model_type": "bert", "vocab_size": 2000}
GEMMA = {
    "model_type": "gemma3_text",
    "vocab_size": 32_000,
    "hidden_size": 1152,
    "num_hidden_layers": 8 if on_pretend_card() else 26,  # the host loads and saves the weights
    "intermediate_size": 6912,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "max_position_embeddings": 1024,
}
CARDS = {"rtx3070_8gb": (8, BERT_BASE), "rtx3090_24gb": (24, GEMMA), "t4_16gb": (16, BERT_BASE)}


def assignments(folder: Path, config: dict[str, object], samples: int = 600) -> list[str]:
    write_samples(folder / "train.jsonl", samples)
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
    ]


@pytest.mark.parametrize("profile", CARDS)
def test_end_to_end_in_the_cards_memory(profile: str, tmp_path: Path, limited_to: Limit) -> None:
    gib, config = CARDS[profile]
    with limited_to(gib):
        plan = api.resolve(profile, assignments=assignments(tmp_path, config), cache=tmp_path / "cache")
        assert plan.hardware.device_type == "cuda"
        heard = Recorder()
        api.execute(plan, tmp_path / "run", heard, cache=tmp_path / "cache")
        assert torch.cuda.max_memory_allocated() <= gib * GIB
    for entry, evidence in heard.found:  # bf16 leaves no product to TF32
        assert evidence.status != "inactive", (entry.name, evidence.seen)
    precision = next(evidence for entry, evidence in heard.found if entry.name == "precision")
    assert precision.status == "active"
    assert (tmp_path / "run" / "final" / "model.safetensors").is_file()


@pytest.mark.device("real")
@pytest.mark.parametrize("profile", CARDS)
def test_training_lowers_the_loss(profile: str, tmp_path: Path, limited_to: Limit) -> None:
    gib, config = CARDS[profile]
    with limited_to(gib):
        heard = Recorder()
        plan = api.resolve(profile, assignments=assignments(tmp_path, config), cache=tmp_path / "cache")
        api.execute(plan, tmp_path / "run", heard, cache=tmp_path / "cache")
    assert heard.losses[-1] < heard.losses[0]


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
