"""No host sync of our own between two log points, and none at all with fused AdamW (G4)."""

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from hwopt.saving.writer import AsyncWriter
from hwopt.testing import plan_for, tiny_job, tiny_profile
from hwopt.training.build import build
from hwopt.training.loop import Loop
from hwopt.training.telemetry import step_timer

pytestmark = pytest.mark.device("any")

FUSED = {"optimizer": {"name": "adamw_torch_fused"}}
PURE = FUSED | {"sdpa": {}, "precision": {"dtype": "bf16", "level": "pure"}}


@contextmanager
def waits_forbidden() -> Iterator[None]:
    """Inside, an operator that makes the host wait for the device raises RuntimeError."""
    before = torch.cuda.get_sync_debug_mode()
    set_sync_debug_mode("error")
    try:
        yield
    finally:
        set_sync_debug_mode(before)


def set_sync_debug_mode(mode: int | str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype feature", UserWarning)
        torch.cuda.set_sync_debug_mode(mode)


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
        PURE | {"checkpointing": {"offload": True}},
        FUSED | {"sdpa": {}, "optimizer_in_backward": {}},  # fp32: with fp16 it cannot be on
    ],
)
def test_step_does_not_wait_for_the_device(
    tables: dict[str, Any], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_timer, "PERIOD", 0.0)  # every step is timed
    # the optimizer in the backward pass cannot clip
    norm = 0.0 if "optimizer_in_backward" in tables else 1.0
    job = tiny_job(tmp_path / "data", kind, samples=200, max_steps=25, logging_steps=1000, max_grad_norm=norm)
    profile = tiny_profile(**tables, dataloader={"num_workers": 1}, **({} if norm else {"batch": {"train": 8, "eval": 8}}))
    with build(plan_for(profile, job), tmp_path / "run", tmp_path / "cache") as run:
        loop = Loop(run, AsyncWriter(run))
        run.model.train()
        with ExitStack() as stack:
            for number, batch in enumerate(loop.batches()):
                if number == 3:  # state and workspaces are made
                    stack.enter_context(waits_forbidden())
                loop.use.timer.begin_step()
                loop.update(batch)
                loop.use.timer.end_step()
                loop.telemetry.stepped(batch)
                if number == 20:
                    break
        torch.cuda.synchronize()  # the timer reports steps that the device has done
        assert len(loop.use.timer.take()) == 21
