"""The seed profiles end to end on a small scale: the effect of each must be visible in a run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from hwopt import api
from hwopt.config.job import JobFile, make_job
from hwopt.config.profile import load_profile
from hwopt.config.profile_files import profile_files
from hwopt.config.toml import Document
from hwopt.plugin.registry import Registry
from hwopt.testing import Recorder, plan_for, tiny_job, tiny_profile, train_tiny, write_samples
from hwopt.training.listener import Row

TINY_GEMMA = {
    "model_type": "gemma3_text",
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "sliding_window": 16,
}


def gemma_job(folder: Path, **training: Any) -> JobFile:
    data = {
        "train": str(write_samples(folder / "train.jsonl", 200)),
        "eval": str(write_samples(folder / "eval.jsonl", 40, seed=1)),
    }
    document = {"model": {"config": TINY_GEMMA}, "data": data | {"max_length": 32}, "training": training}
    return make_job(Document("gemma", document))


class Frozen(Recorder):
    """Records the weights before the first step and the names of those that differ after the last one."""

    def on_start(self, run: Any) -> None:
        super().on_start(run)
        self.before = {name: p.detach().clone() for name, p in run.inner_model.named_parameters()}
        self.changed: set[str] = set()

    def on_log(self, run: Any, row: Row) -> None:
        super().on_log(run, row)
        if row["step"] == run.total_steps:
            now = run.inner_model.named_parameters()
            self.changed = {name for name, p in now if not torch.equal(p, self.before[name])}


def test_dora_on_a_decoder_changes_adapter_and_head_only(tmp_path: Path) -> None:
    profile = load_profile("rtx3090_24gb", profile_files(), ["plugins.adapter.always=true", "plugins.dataloader.num_workers=0"])
    plan = plan_for(profile, gemma_job(tmp_path, max_steps=10, learning_rate=3e-3, logging_steps=1, eval_steps=5))
    recorder = Frozen()
    api.execute(plan, tmp_path / "run", recorder, cache=tmp_path / "cache")
    assert recorder.changed
    assert all("lora_" in name or "score" in name for name in recorder.changed)
    final = tmp_path / "run" / "final"
    merged = AutoModelForSequenceClassification.from_pretrained(final)
    assert not any("lora" in name for name, _ in merged.named_parameters())
    assert json.loads((final / "adapter" / "adapter_config.json").read_text())["use_dora"] is True
    assert (final / "adapter" / "adapter_model.safetensors").is_file()


def test_adapter_is_skipped_below_500_million_parameters(tmp_path: Path) -> None:
    plan = plan_for(load_profile("rtx3090_24gb", profile_files()), gemma_job(tmp_path))
    entry = next(entry for entry in plan.entries if entry.name == "adapter")
    assert entry.decision == "skip"
    assert "500" in entry.reason


def test_decoder_pools_at_the_last_real_token(tmp_path: Path) -> None:
    """final/ gives the same logits for a single text as for the text in a padded batch."""
    plan = plan_for(tiny_profile(), gemma_job(tmp_path, max_steps=5))
    train_tiny(plan, tmp_path)
    final = tmp_path / "run" / "final"
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(final).eval(), AutoTokenizer.from_pretrained(final)
    assert model.config.pad_token_id is not None
    texts = ["red", "one two three four five up down left right", "hot cold old new"]
    with torch.no_grad():
        together = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits
        alone = torch.cat([model(**tokenizer(text, return_tensors="pt")).logits for text in texts])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_half_weights_are_saved_as_their_masters(dtype: str, tmp_path: Path) -> None:
    profile = tiny_profile(precision={"dtype": dtype, "level": "O2"} if dtype == "bf16" else {"dtype": "fp32"})
    train_tiny(plan_for(profile, tiny_job(tmp_path / "data", max_steps=6, save_steps=3)), tmp_path)
    for folder in ("final", "checkpoint-3"):
        saved = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / folder, dtype="auto")
        weights = saved.bert.encoder.layer[0].output.dense.weight
        assert weights.dtype == torch.float32
        rounded = torch.equal(weights, weights.bfloat16().float())
        assert not rounded, "the bits below half precision are there"


def test_saved_language_model_and_its_tokenizer_open_together(tmp_path: Path) -> None:
    text = tmp_path / "rhyme.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 120)
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 300,
        "max_position_embeddings": 64,
    }
    document = {
        "model": {"config": config},
        "data": {"train": str(text), "eval_fraction": 0.1, "max_length": 32},
        "task": {"kind": "causal-lm"},
        "training": {"max_steps": 6, "learning_rate": 5e-3},
    }
    recorder = train_tiny(plan_for(tiny_profile(), make_job(Document("rhyme", document))), tmp_path)
    last = recorder.rows[-1]
    assert last["eval_perplexity"] == pytest.approx(math.exp(last["eval_loss"]), rel=1e-5)
    final = tmp_path / "run" / "final"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(final), AutoTokenizer.from_pretrained(final)
    prompt = tokenizer("the quick brown", return_tensors="pt", return_token_type_ids=False)
    made = tokenizer.decode(model.generate(**prompt, max_new_tokens=12, do_sample=False)[0])
    assert made.startswith("the quick brown")
    assert len(made) > len("the quick brown")


def test_every_seed_profile_trains_on_this_machine(tmp_path: Path) -> None:
    """Without a GPU every profile trains, and each skipped plugin has a reason."""
    for name in ("rtx3070_8gb", "rtx3070_8gb_batch16", "t4_16gb"):
        profile = load_profile(name, profile_files(), ["plugins.dataloader.num_workers=0"])
        recorder = train_tiny(plan_for(profile, tiny_job(tmp_path / name / "data"), Registry()), tmp_path / name)
        assert len(recorder.losses) == 3
        for entry, evidence in recorder.found:
            assert evidence.status != "inactive", (name, entry.name, evidence.seen)
