"""The cards of the shipped profiles: their variants, and the formulas beside their peaks."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import hwopt.config.card
from hwopt.config.card import Card, known_card, known_cards
from hwopt.config.profile import Profile, load_profile
from hwopt.config.profile_files import profile_files
from hwopt.hardware.device import Hardware, described

TEXTS = {name: path.read_text(encoding="utf-8") for name, path in profile_files().items()}
OWN_CARDS = [name for name, text in TEXTS.items() if "[card]" in text and "\namd = " not in text and name != "cpu"]
KNOWN = (Path(hwopt.config.card.__file__).parent / "cards.toml").read_text(encoding="utf-8").split("[[cards]]")[1:]
SOURCE = re.compile(
    r"NVIDIA's page of the card|NVIDIA .*(white paper|data sheet)|[Tt]he same (table|paper|data sheet)|rates per SM"
)
FORMULA = re.compile(r"(\d+)(?: SM| #) x (\d+) FMA x 2 x ([\d.]+) GHz")


def shipped(name: str) -> Profile:
    return load_profile(name, profile_files())


@pytest.mark.parametrize(
    ("profile", "device", "capability", "gib", "bandwidth", "tensor"),
    [
        ("rtx3070_8gb", "NVIDIA GeForce RTX 3070", (8, 6), 7.78, 448, 40.6),
        ("rtx3070_8gb", "NVIDIA GeForce RTX 3070 Ti", (8, 6), 7.78, 608, 43.5),
        ("rtx3070_8gb", "NVIDIA GeForce RTX 3070 Laptop GPU", (8, 6), 7.78, None, None),
        ("rtx3060_12gb", "NVIDIA GeForce RTX 3060 Ti", (8, 6), 7.78, 448, 32.4),
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
    assert card is not None
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


def test_profile_of_a_laptop_card_keeps_its_own_peaks() -> None:
    card = Card(match=("RTX 4090 Laptop GPU",), memory_gib=15.6, compute_capability="8.9", memory_bandwidth_gbps=576)
    name = "NVIDIA GeForce RTX 4090 Laptop GPU"
    assert card.variant_named(name) is None
    assert card.describes(described(name, (8, 9), 15.6))


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


@pytest.mark.parametrize(("card", "text"), list(zip(known_cards(), KNOWN, strict=True)), ids=lambda value: str(value)[:40])
def test_peaks_of_known_cards_follow_from_their_comments(card: hwopt.config.card.KnownCard, text: str) -> None:
    bits, rate = re.findall(r"(\d+) bit x ([\d.]+) Gbit/s", text)[0] if "bit x" in text else (0, 0)
    if bits:
        assert card.memory_bandwidth_gbps == pytest.approx(float(bits) * float(rate) / 8, rel=0.01)
    if formula := FORMULA.search(text):
        number, width, clock = int(formula[1]), int(formula[2]), float(formula[3])
        assert card.dense_tflops.fp16 == pytest.approx(number * width * 2 * clock / 1000, rel=0.005)
    assert bits or "data sheet" in text


def test_memory_limit_keeps_the_card() -> None:
    limited = Hardware("cuda", "NVIDIA GeForce RTX 3090", 8, 8, compute_capability=(8, 6), memory_limit_gib=8)
    profile = shipped("rtx3090_24gb")
    assert profile.card_of(limited) == profile.card


@pytest.mark.parametrize("name", OWN_CARDS)
def test_figures_follow_from_their_comments_and_name_a_source(name: str) -> None:
    """SM x FMA x 2 x clock gives the tensor peak, and bus width x data rate the bandwidth."""
    text, card = TEXTS[name].split("[card]")[1].split("[tuned_for]")[0], shipped(name).card
    blocks = text.split("[[card.variants]]")
    assert len(blocks) == 1 + len(card.variants)
    peaks = [(block, formula) for block in blocks if (formula := FORMULA.search(block))]
    assert peaks
    for block, formula in peaks:
        peak = float(re.findall(r"fp16 = ([\d.]+)", block)[0])
        assert int(formula[1]) * int(formula[2]) * 2 * float(formula[3]) / 1000 == pytest.approx(peak, rel=0.015), block
    for gbps, bits, rate in re.findall(r"memory_bandwidth_gbps = (\d+) #.*?(\d+) bit x ([\d.]+) Gbit/s", text):
        assert int(bits) * float(rate) / 8 == pytest.approx(float(gbps), rel=0.01), (gbps, bits, rate)
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if line.startswith(("memory_bandwidth_gbps", "dense_tflops")):
            above = lines[number - 2 : number] if line.startswith("dense_tflops") else []
            assert SOURCE.search(" ".join([*above, line.partition("#")[2]])), line


def test_max_perf_sets_every_plugin_option_itself() -> None:
    own = tomllib.loads(Path(profile_files()["rtx3090_24gb_max_perf"]).read_text(encoding="utf-8"))["plugins"]
    assert own == dict(shipped("rtx3090_24gb_max_perf").plugin_tables())
    assert own == dict(shipped("rtx3090_24gb").plugin_tables())
