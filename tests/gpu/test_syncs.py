"""No host sync of our own between two log points, and none at all with fused AdamW (G4)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hwopt.saving.async_writer import AsyncWriter
from hwopt.testing import plan_for, tiny_job, tiny_profile
from hwopt.training.build import build
from hwopt.training.loop import Loop

FUSED = {"optimizer": {"name": "adamw_torch_fused"}}


@pytest.mark.parametrize("kind", ["text-classification", "causal-lm"])
@pytest.mark.parametrize(
    "tables",
    [
        FUSED,
        FUSED | {"precision": {"dtype": "bf16"}},
        FUSED | {"precision": {"dtype": "fp16"}},
        FUSED | {"precision": {"dtype": "fp16", "level": "O2"}},
        FUSED | {"precision": {"dtype": "bf16"}, "fused_loss": {"backend": "torch"}},
        FUSED | {"length_batching": {}, "sdpa": {}, "checkpointing": {}, "tf32": {}},
    ],
)
def test_a_step_never_waits_for_the_device(tables: dict[str, Any], kind: str, tmp_path: Path) -> None:
    job = tiny_job(tmp_path / "data", kind, samples=200, max_steps=25, logging_steps=1000)
    profile = tiny_profile(**tables, dataloader={"num_workers": 1})
    with build(plan_for(profile, job), tmp_path / "run", tmp_path / "cache") as run:
        loop = Loop(run, AsyncWriter(run))
        run.model.train()
        for number, batch in enumerate(loop.batches()):
            if number == 3:  # state and workspaces are made
                torch.cuda.set_sync_debug_mode("error")
            try:
                loop.update(batch)
                if number < 20:
                    loop.telemetry.stepped(batch)
            finally:
                if number >= 20:
                    torch.cuda.set_sync_debug_mode("default")
            if number >= 20:
                break
        torch.cuda.set_sync_debug_mode("default")
