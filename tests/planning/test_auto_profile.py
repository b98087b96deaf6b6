"""`--profile auto`: which profile a card gets, and with which sizes and peaks."""

from __future__ import annotations

import pytest

from hwopt.config.profile import Profile
from hwopt.hardware.device import Hardware
from hwopt.planning.auto_profile import choose
from hwopt.planning.inputs import Inputs

INPUTS = Inputs()


def chosen(name: str, capability: tuple[int, int], gib: float) -> tuple[Profile, str]:
    hardware = Hardware("cuda", name, gib, gib, compute_capability=capability, cpu_cores=8)
    return choose(hardware, INPUTS.files, INPUTS.registry, INPUTS.profile)


@pytest.mark.parametrize(
    ("name", "capability", "gib", "profile"),
    [
        ("NVIDIA GeForce RTX 3070", (8, 6), 7.78, "rtx3070_8gb"),
        ("NVIDIA GeForce RTX 3070 Ti", (8, 6), 7.78, "rtx3070_8gb"),
        ("NVIDIA GeForce RTX 3090", (8, 6), 23.7, "rtx3090_24gb"),
        ("NVIDIA A10G", (8, 6), 22.19, "a10_24gb"),
        ("NVIDIA H100 PCIe", (9, 0), 79.2, "h100_80gb"),
        ("NVIDIA H200 NVL", (9, 0), 139.8, "h200_141gb"),
        ("NVIDIA GeForce RTX 4060 Ti", (8, 9), 7.63, "rtx4060_8gb"),
        ("Tesla V100S-PCIE-32GB", (7, 0), 31.74, "v100_32gb"),
        ("Tesla T4", (7, 5), 14.56, "t4_16gb"),
    ],
)
def test_card_gets_its_own_profile(name: str, capability: tuple[int, int], gib: float, profile: str) -> None:
    assert chosen(name, capability, gib)[0].name == profile


def test_card_of_equal_memory_gets_equal_sizes() -> None:
    """An RTX 3060 Ti has the memory of an RTX 3070, and gets its 64 rows, with the peaks of the 3060 Ti."""
    for gib in (7.66, 7.78, 8.0):
        profile, why = chosen("NVIDIA GeForce RTX 3060 Ti", (8, 6), gib)
        assert profile.name == "auto-rtx3070_8gb", why
        batch = dict(profile.plugin_tables())["batch"]
        assert (batch["train"], batch["gradient_accumulation_steps"]) == (64, 2)
        assert profile.card.memory_bandwidth_gbps == 448
        assert profile.card.dense_tflops.fp16 == 32.4


def test_larger_version_of_a_card_gets_larger_sizes_and_its_peaks() -> None:
    profile, why = chosen("NVIDIA GeForce RTX 4060 Ti", (8, 9), 15.6)
    assert profile.name.startswith("auto-"), why
    assert profile.card.dense_tflops.fp16 == 44.1


def test_unknown_card_has_no_peaks() -> None:
    profile, _ = chosen("NVIDIA RTX 6000 of some year", (8, 9), 47.0)
    assert profile.card.memory_bandwidth_gbps is None
    assert profile.card.dense_tflops.fp16 is None
