"""Evidence on a CUDA device: the kernels that the driver launched, and mutations of torch that only CUDA shows."""

from pathlib import Path
from typing import Any

import pytest
from plugin_cases import Mutation, cases, check_mutation, mutations, release_memory
from pretend_cuda.counters import counting

from hwopt.testing import plan_for, tiny_job, tiny_profile, train_tiny

FLASH, EFFICIENT, FUSED_ADAM = "pytorch_flash::flash_bwd", "fmha_cutlassB", "FusedOptimizerTensorListMetadata"
HALF: dict[str, Any] = {"precision": {"dtype": "bf16"}}
KERNELS = {  # kernel -> plugin, task, options, and the mutation of torch after which it does not run
    FLASH: ("sdpa", "causal-lm", {"prefer": ("flash", "math")}, "torch has no fused attention"),
    EFFICIENT: ("sdpa", "text-classification", {"prefer": ("efficient", "math")}, "torch has no fused attention"),
    FUSED_ADAM: ("optimizer", "text-classification", {"name": "adamw_torch_fused"}, "AdamW is not fused"),
}


@pytest.mark.device("pretend")
@pytest.mark.parametrize("kernel", KERNELS)
def test_evidence_agrees_with_the_kernels_that_were_launched(
    kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, kind, options, what = KERNELS[kernel]

    def evidence_and_launches(folder: Path) -> tuple[str, int]:
        plan = plan_for(tiny_profile(**HALF, **{name: options}), tiny_job(folder / "data", kind, max_steps=1))
        with counting() as counts:
            recorder = train_tiny(plan, folder)
        status = next(evidence.status for entry, evidence in recorder.found if entry.name == name)
        return status, sum(number for launched, number in counts.kernels.items() if kernel in launched)

    status, launches = evidence_and_launches(tmp_path / "before")
    assert (status, launches > 0) == ("active", True)
    next(mutation.patch for mutation in cases(name).mutations if mutation.what == what)(monkeypatch)
    assert evidence_and_launches(tmp_path / "after") == ("inactive", 0)


@pytest.fixture(autouse=True)
def no_cached_memory() -> None:
    """Return the allocator's cached segments to the device: they keep the settings under which they were made."""
    release_memory()


@pytest.mark.device("any")
@pytest.mark.parametrize(("name", "mutation"), mutations(on_cuda=True))
def test_evidence_of_an_optimization_without_effect_is_inactive(
    name: str, mutation: Mutation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_mutation(name, mutation, tmp_path, monkeypatch)
