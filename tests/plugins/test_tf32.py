"""Both switches are on inside the block and restored after it; cards without TF32 are skipped."""

from types import SimpleNamespace

import pytest
import torch
from plugin_cases import Cases, Mutation

from hwopt.hardware.device import described
from hwopt.plugin import Context, Observation, Recipe, verify
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
    ("capability", "kind", "why"), [((7, 5), "skip", "found compute capability 7.5"), ((8, 0), "apply", "fp32 products only")]
)
def test_tf32_applies_from_compute_capability_8_0_on(capability, kind, why):
    decision = Tf32(Tf32.Options()).probe(context(capability))
    assert (decision.kind, why in decision.reason) == (kind, True), decision.reason


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
        torch.backends.cudnn.conv.fp32_precision = "ieee"
        assert verify(plugin, run).status == "inactive"


def no_tf32(patch):
    """torch ignores a request for TF32 products."""
    patch.setattr(torch, "set_float32_matmul_precision", lambda precision: None)


CASES = Cases(
    hardware=described("a card", (8, 6), 24.0),
    mutations=(Mutation("torch ignores the request", no_tf32, "allow_tf32 off", on_cuda=True),),
)
