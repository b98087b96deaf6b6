"""Both switches are on inside the block and restored after it; skipped without TF32 and beside half precision."""

from types import SimpleNamespace

import pytest
import torch
from plugin_cases import Cases, Mutation

from hwopt.hardware.device import described
from hwopt.plugin import Context, Observation, Recipe, verify
from hwopt.testing import plan_for, tiny_job, tiny_profile
from hwopt_plugins.tf32 import Tf32, older_interface, tf32_kernels


def context(capability):
    return Context(hardware=described("card", capability, 16.0), software={}, model=None, job=None)


def settings():
    return (
        torch.backends.cuda.matmul.fp32_precision,
        torch.backends.cudnn.conv.fp32_precision,
        torch.backends.mkldnn.matmul.fp32_precision,
        torch.get_float32_matmul_precision(),
    )


@pytest.mark.parametrize(
    ("capability", "precision", "kind", "why"),
    [
        ((7, 5), {"dtype": "fp32"}, "skip", "found compute capability 7.5"),
        ((8, 0), {"dtype": "fp32"}, "apply", "products in fp32"),
        ((8, 0), None, "apply", "products in fp32"),
        ((8, 0), {}, "skip", "half precision leaves no product in fp32"),
        ((8, 0), {"dtype": "fp16", "level": "O2"}, "skip", "half precision leaves no product in fp32"),
    ],
)
def test_tf32_applies_from_compute_capability_8_0_on_without_half_precision(capability, precision, kind, why, tmp_path):
    tables = {"tf32": {}} | ({} if precision is None else {"precision": precision})
    hardware = described("card", capability, 16.0)
    plan = plan_for(tiny_profile(**tables), tiny_job(tmp_path), hardware=hardware, strict=capability == (8, 0))
    entry = next(entry for entry in plan.entries if entry.name == "tf32")
    assert (entry.decision, why in entry.reason, bool(plan.recipe.process)) == (kind, True, kind == "apply"), entry.reason


def test_setting_is_restored_after_the_block():
    before = settings()
    with tf32_kernels():
        assert settings()[:2] == ("tf32", "tf32")
        assert settings()[2] == before[2], "the CPU's kernels are not touched"
        assert torch.get_float32_matmul_precision() == "high", "the older interface agrees and does not raise"
        assert older_interface() == "on"
    assert settings() == before


def test_evidence_reads_the_live_setting():
    plugin, recipe = Tf32(Tf32.Options()), Recipe()
    plugin.apply(recipe, context((8, 0)))
    run = SimpleNamespace(observation=Observation(matmul_dtypes={"float": 3, "c10::BFloat16": 40}))
    assert verify(plugin, run).status == "inactive"
    with recipe.process[0]():
        evidence = verify(plugin, run)
        assert evidence.status == "active"
        assert "3 of 43" in evidence.seen
        halved = SimpleNamespace(observation=Observation(matmul_dtypes={"c10::BFloat16": 40}))  # autocast of a script
        assert verify(plugin, halved).status == "unknown"
        torch.backends.cudnn.conv.fp32_precision = "ieee"
        assert verify(plugin, run).status == "inactive"


def no_tf32(patch):
    """torch ignores a request for TF32 products."""
    patch.setattr(torch, "set_float32_matmul_precision", lambda precision: None)


CASES = Cases(
    hardware=described("a card", (8, 6), 24.0),
    whole="settings of the process, which another test here changes one by one",
    mutations=(Mutation("torch ignores the request", no_tf32, "allow_tf32 off", on_cuda=True),),
)
