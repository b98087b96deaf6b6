"""The cards of the shipped profiles: their variants, and the formulas beside their peaks."""

import tomllib
from pathlib import Path

import pytest

from hwopt.config.card import known_card, known_cards
from hwopt.config.profile import Profile, load_profile
from hwopt.config.profile_files import profile_files
from hwopt.hardware.device import Hardware, described


def shipped(name: str) -> Profile:
    return load_profile(name, profile_files())


@pytest.mark.parametrize(
    ("profile", "device", "capability", "gib", "bandwidth", "tensor"),
    [
        ("rtx3070_8gb", "NVIDIA GeForce RTX 3070", (8, 6), 7.78, 448, 40.6),
        ("rtx3070_8gb", "NVIDIA GeForce RTX 3070 Ti", (8, 6), 7.78, 608, 43.5),
        ("rtx3070_8gb", "NVIDIA GeForce RTX 3070 Laptop GPU", (8, 6), 7.78, None, None),
        ("a10_24gb", "NVIDIA A10G", (8, 6), 22.19, 600, 70),
        ("h100_80gb", "NVIDIA H100 80GB HBM3", (9, 0), 79.11, 3352, 989),
        ("h100_80gb", "NVIDIA H100 PCIe", (9, 0), 79.18, 2039, 756),
        ("v100_32gb", "Tesla V100S-PCIE-32GB", (7, 0), 31.74, 1134, 130),
    ],
)
def test_variant_has_its_own_peaks(
    profile: str, device: str, capability: tuple[int, int], gib: float, bandwidth: float | None, tensor: float | None
) -> None:
    card = shipped(profile).card_of(described(device, capability, gib))
    assert (card.memory_bandwidth_gbps, card.dense_tflops.fp16) == (bandwidth, tensor)


@pytest.mark.parametrize(
    ("profile", "device", "capability", "gib"),
    [
        ("l4_24gb", "NVIDIA L40S", (8, 9), 44.5),
        ("a10_24gb", "NVIDIA A100-SXM4-40GB", (8, 0), 39.4),
        ("h200_141gb", "NVIDIA GH200 480GB", (9, 0), 94.5),
        ("rtx3060_12gb", "NVIDIA GeForce RTX 3060", (8, 6), 7.78),  # the version with 8 GB has another memory bus
    ],
)
def test_card_of_another_name_or_size_has_no_peaks(profile: str, device: str, capability: tuple[int, int], gib: float) -> None:
    assert shipped(profile).card_of(described(device, capability, gib)) is None


@pytest.mark.parametrize(
    ("device", "gib", "tensor"),
    [
        ("NVIDIA GeForce RTX 3080", 9.65, 59.5),
        ("NVIDIA GeForce RTX 3080", 11.6, 61.3),
        ("NVIDIA GeForce RTX 3080", 19.6, None),  # a version for miners
        ("NVIDIA GeForce RTX 4070 Ti SUPER", 15.6, 88.2),
        ("NVIDIA GeForce RTX 4070 Laptop GPU", 7.63, None),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 95.0, None),
    ],
)
def test_card_without_a_profile_has_known_peaks(device: str, gib: float, tensor: float | None) -> None:
    card = known_card(described(device, (8, 9), gib))
    assert (card and card.dense_tflops.fp16) == tensor


def test_memory_limit_keeps_the_card() -> None:
    limited = Hardware("cuda", "NVIDIA GeForce RTX 3090", 8, 8, compute_capability=(8, 6), memory_limit_gib=8)
    profile = shipped("rtx3090_24gb")
    assert profile.card_of(limited) == profile.card


def test_max_perf_sets_every_plugin_option_itself() -> None:
    own = tomllib.loads(Path(profile_files()["rtx3090_24gb_max_perf"]).read_text(encoding="utf-8"))["plugins"]
    assert own == dict(shipped("rtx3090_24gb_max_perf").plugin_tables())
    assert own == dict(shipped("rtx3090_24gb").plugin_tables())


def test_a_card_with_a_profile_has_its_facts_there_alone() -> None:
    """Profiles match by parts of the name: "GeForce RTX 3080" is the name of another card than "GeForce RTX 3080 Ti"."""
    of_profiles = {name for profile in profile_files() for name in shipped(profile).card.match}
    assert not of_profiles & {name for card in known_cards() for name in card.match}
