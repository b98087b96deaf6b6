"""The seed profiles end to end on a small scale: the effect of each must be visible in a run."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification

from hwopt.config.profile import load_profile
from hwopt.config.profile_files import profile_files
from hwopt.plugin.registry import Registry
from hwopt.testing import plan_for, tiny_job, tiny_profile, train_tiny


def test_half_weights_are_saved_as_their_masters(tmp_path: Path) -> None:
    profile = tiny_profile(precision={"dtype": "bf16", "level": "O2"})
    train_tiny(plan_for(profile, tiny_job(tmp_path / "data", max_steps=6, save_steps=3)), tmp_path)
    for folder in ("final", "checkpoint-3"):
        saved = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / folder, dtype="auto")
        weights = saved.bert.encoder.layer[0].output.dense.weight
        assert weights.dtype == torch.float32
        rounded = torch.equal(weights, weights.bfloat16().float())
        assert not rounded, "the bits below half precision are there"


def test_every_seed_profile_trains_on_this_machine(tmp_path: Path) -> None:
    """Without a GPU every profile trains, and each skipped plugin has a reason."""
    for name in ("rtx3070_8gb", "rtx3070_8gb_batch16", "t4_16gb"):
        profile = load_profile(name, profile_files(), ["plugins.dataloader.num_workers=0"])
        recorder = train_tiny(plan_for(profile, tiny_job(tmp_path / name / "data"), Registry()), tmp_path / name)
        assert len(recorder.losses) == 3
        for entry, evidence in recorder.found:
            assert evidence.status != "inactive", (name, entry.name, evidence.seen)
