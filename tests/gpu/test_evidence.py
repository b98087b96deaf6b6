"""Evidence on a CUDA device: the kernels that the driver launched, and mutations of torch that only CUDA shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mutations import Mutation, check
from mutations.model import no_fused_attention
from mutations.process import ON_CUDA, release_memory
from mutations.update import states_are_not_paged, unfused_adamw
from pretend_cuda.counters import counting

from hwopt.testing import plan_for, tiny_job, tiny_profile, train_tiny

FLASH, EFFICIENT, FUSED_ADAM = "pytorch_flash::flash_bwd", "fmha_cutlassB", "FusedOptimizerTensorListMetadata"
HALF: dict[str, Any] = {"precision": {"dtype": "bf16"}}
KERNELS = {  # kernel -> plugin, task, options, and a mutation of torch after which the kernel does not run
    FLASH: ("sdpa", "causal-lm", {"prefer": ("flash", "math")}, no_fused_attention),
    EFFICIENT: ("sdpa", "text-classification", {"prefer": ("efficient", "math")}, no_fused_attention),
    FUSED_ADAM: ("optimizer", "text-classification", {"name": "adamw_torch_fused"}, unfused_adamw),
}


@pytest.mark.device("pretend")
@pytest.mark.parametrize("kernel", KERNELS)
def test_evidence_agrees_with_the_kernels_that_were_launched(
    kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, kind, options, mutate = KERNELS[kernel]

    def evidence_and_launches(folder: Path) -> tuple[str, int]:
        plan = plan_for(tiny_profile(**HALF, **{name: options}), tiny_job(folder / "data", kind, max_steps=1))
        with counting() as counts:
            recorder = train_tiny(plan, folder)
        status = next(evidence.status for entry, evidence in recorder.found if entry.name == name)
        return status, sum(number for launched, number in counts.kernels.items() if kernel in launched)

    status, launches = evidence_and_launches(tmp_path / "before")
    assert (status, launches > 0) == ("active", True)
    mutate(monkeypatch)
    assert evidence_and_launches(tmp_path / "after") == ("inactive", 0)


@pytest.fixture(autouse=True)
def no_cached_memory() -> None:
    """Return the allocator's cached segments to the device: they keep the settings under which they were made."""
    release_memory()


def never_pinned(patch: pytest.MonkeyPatch) -> None:
    """torch leaves tensors in pageable memory."""
    patch.setattr(torch.Tensor, "pin_memory", lambda self, *device: self)


WIDE = {"model_type": "bert", "vocab_size": 64, "hidden_size": 320, "num_hidden_layers": 1, "num_attention_heads": 2}
"""bitsandbytes pages states of at least 100,000 elements."""
ON_ANY_CARD = (
    *ON_CUDA,
    Mutation("dataloader", "memory is not pinned", never_pinned, "expected pinned True", {"num_workers": 0, "pin_memory": True}),
    Mutation(
        "optimizer",
        "states are not paged",
        states_are_not_paged,
        "expected paged True",
        {"name": "paged_adamw_32bit"},
        job={"config": WIDE},
    ),
)


@pytest.mark.device("any")
@pytest.mark.parametrize("mutation", ON_ANY_CARD, ids=str)
def test_evidence_of_an_optimization_without_effect_is_inactive(
    mutation: Mutation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(mutation, tmp_path, monkeypatch)


@pytest.mark.device("any")
def test_tf32_is_unknown_if_no_product_runs_in_fp32(tmp_path: Path) -> None:
    # a pretend card computes the attention of a smaller model with products of its own
    plan = plan_for(tiny_profile(**HALF, sdpa={}, tf32={}), tiny_job(tmp_path / "data", config=WIDE, max_steps=1))
    if "tf32" not in {entry.name for entry in plan.applied()}:
        pytest.skip("needs compute capability 8.0")
    evidence = next(evidence for entry, evidence in train_tiny(plan, tmp_path).found if entry.name == "tf32")
    assert (evidence.status, "so TF32 had nothing to speed up" in evidence.seen) == ("unknown", True), evidence.seen
