"""The one contract test: every plugin that is installed, found through the registry, driven through a tiny real run."""

from __future__ import annotations

from pathlib import Path

import pytest

from hwopt.plugin.registry import Registry
from hwopt.testing import check_contract_of

OPTIONS = {  # where the defaults would not show the plugin at work
    "adapter": {"always": True, "r": 4},
    "batch": {"train": 4, "accumulation": 2},
    "compile": {"scope": "block", "widths": [32]},
    "precision": {"dtype": "bf16"},
    "quantize": {"dtype": "fp32"},
    "schedule": {"warmup_ratio": 0.5},
    "zero": {"stage": 2, "offload": "none"},
}
KINDS = {"fused_loss": "causal-lm", "quantize": "causal-lm"}  # where the plugin would skip a classification
BESIDE = {"quantize": {"adapter": {"always": True, "r": 4}}}  # what the plugin needs


@pytest.mark.parametrize("name", Registry().names)
def test_contract(name: str, tmp_path: Path) -> None:
    kind = KINDS.get(name, "text-classification")
    check_contract_of(name, tmp_path, OPTIONS.get(name), kind=kind, beside=BESIDE.get(name))
