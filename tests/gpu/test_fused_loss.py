"""The fused loss on a card: plain torch and liger's kernels against the loss with logits."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy, linear

from hwopt.testing import plan_for, tiny_job, tiny_profile, train_tiny
from hwopt_plugins.fused_loss.cross_entropy import liger_cross_entropy, linear_cross_entropy

pytestmark = pytest.mark.device("real")

LIGER = pytest.param("liger", marks=pytest.mark.skipif(find_spec("liger_kernel") is None, reason="liger-kernel is not installed"))


@pytest.mark.parametrize("backend", ["torch", LIGER])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("frozen", [False, True])
def test_loss_and_gradients(backend: str, dtype: torch.dtype, frozen: bool) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    hidden, weight = (torch.randn(size, 64, generator=generator, device="cuda") for size in (300, 1000))
    targets = torch.randint(0, 1000, (300,), generator=generator, device="cuda")
    targets[::5] = -100

    def found(how: str) -> list[torch.Tensor]:
        leaf, head = hidden.clone().requires_grad_(), weight.clone().requires_grad_(not frozen)
        if how == "torch":
            loss = linear_cross_entropy(leaf, head, None, targets, chunks=7, dtype=dtype, on_card=True)
        elif how == "liger":
            loss = liger_cross_entropy(leaf, head, None, targets, dtype=dtype)
        else:
            loss = cross_entropy(linear(leaf.to(dtype), head.to(dtype)).float(), targets, reduction="sum")
        loss.backward(torch.tensor(0.01, device="cuda"))
        return [x for x in (loss.detach(), leaf.grad, head.grad) if x is not None]

    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for ours, theirs in zip(found(backend), found("logits"), strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) <= tolerance


@pytest.mark.parametrize("backend", ["torch", LIGER])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_run_with_fused_loss_matches_the_run_without(backend: str, level: str, dtype: str, tmp_path: Path) -> None:
    job = tiny_job(tmp_path / "data", "causal-lm")
    tables: dict[str, Any] = {"precision": {"dtype": dtype, "level": level}}
    ours = train_tiny(plan_for(tiny_profile(**tables, fused_loss={"backend": backend}), job), tmp_path / "with")
    theirs = train_tiny(plan_for(tiny_profile(**tables), job), tmp_path / "without")
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-3)
    evidence = next(evidence for entry, evidence in ours.found if entry.name == "fused_loss")
    assert evidence.status == "active", evidence.seen
