"""`--profile auto`: which profile a card gets, and with which sizes and peaks."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from pinned_torch import IS_PINNED
from programs import BENCHMARKS, program

from hwopt import api
from hwopt.config.profile import Profile
from hwopt.errors import InputError
from hwopt.hardware.device import Hardware
from hwopt.memory.trace.tracing_process import NotTraceable
from hwopt.planning.auto_profile import choose
from hwopt.planning.inputs import Inputs
from hwopt.planning.plan import Plan

INPUTS = Inputs()
SMALL_BERT = 'model.config={ model_type = "bert", num_hidden_layers = 3, hidden_size = 1200 }'

Planned = Callable[..., Plan]


def card(name: str, capability: tuple[int, int], gib: float) -> Hardware:
    return Hardware("cuda", name, gib, gib, compute_capability=capability, cpu_cores=8)


@pytest.mark.parametrize(
    ("name", "capability", "gib", "profile"),
    [
        ("NVIDIA GeForce RTX 3070 Ti", (8, 6), 7.78, "rtx3070_8gb"),
        ("NVIDIA A10G", (8, 6), 22.19, "a10_24gb"),
        ("NVIDIA H100 PCIe", (9, 0), 79.2, "h100_80gb"),
        ("NVIDIA H200 NVL", (9, 0), 139.8, "h200_141gb"),
        ("NVIDIA GeForce RTX 4060 Ti", (8, 9), 7.63, "rtx4060_8gb"),
        ("Tesla V100S-PCIE-32GB", (7, 0), 31.74, "v100_32gb"),
        ("NVIDIA GeForce RTX 2080 Ti", (7, 5), 10.75, "auto-t4_16gb"),
    ],
)
def test_card_gets_its_own_profile(name: str, capability: tuple[int, int], gib: float, profile: str) -> None:
    assert choose(card(name, capability, gib), INPUTS).profile.name == profile


GPU_PROFILES = [profile for profile in map(INPUTS.profile, INPUTS.files) if profile.card.capability]


@pytest.mark.parametrize("profile", GPU_PROFILES, ids=lambda profile: profile.name)
def test_every_shipped_profile_is_of_the_card_that_auto_takes_for_its_own(profile: Profile) -> None:
    own = profile.card
    for match in own.match:
        assert choose(card(match, own.capability, own.memory_gib or 0.0), INPUTS).profile.card == own


@pytest.mark.parametrize("hardware", program("cards").cards(), ids=lambda card: f"{card.name} {card.memory_gib:g}")
def test_page_of_cards_has_the_profile_that_each_card_gets(hardware: Hardware) -> None:
    row = f"| {hardware.name}, {hardware.memory_gib:g} GiB | `{choose(hardware, INPUTS).profile.name}` |"
    assert row in (BENCHMARKS.parent / "docs/cards.md").read_text(encoding="utf-8"), "benchmarks/cards.py --write makes the page"


def test_profile_that_extends_another_one_is_found_by_its_own_card(tmp_path: Path) -> None:
    inputs, file = Inputs(), tmp_path / "rtx4080_16gb.toml"
    file.write_text('name = "rtx4080_16gb"\nextends = "rtx4090_24gb"\n[card]\nmatch = ["GeForce RTX 4080"]\nmemory_gib = 15.6\n')
    inputs.files = {**inputs.files, file.stem: file}
    assert choose(card("NVIDIA GeForce RTX 4080", (8, 9), 15.6), inputs).profile.name == file.stem
    assert choose(card("NVIDIA GeForce RTX 4090", (8, 9), 23.6), inputs).profile.name == "rtx4090_24gb"


def test_two_profiles_of_one_card_are_refused_unless_one_extends_the_other(tmp_path: Path) -> None:
    table = '[card]\nmatch = ["GeForce RTX 3070"]\nmemory_gib = 7.78\ncompute_capability = "8.6"\n'
    inputs, file = Inputs(), tmp_path / "mine.toml"
    inputs.files = {**inputs.files, file.stem: file}
    file.write_text(f'name = "mine"\nextends = "rtx3070_8gb"\n{table}')
    assert choose(card("NVIDIA GeForce RTX 3070", (8, 6), 7.78), inputs).profile.name == "rtx3070_8gb"
    file.write_text(f'name = "mine"\n{table}')
    inputs.read.cache_clear()
    both = r"'rtx3070_8gb' and 'mine' are both for .*RTX 3070' .* name one of them, or change match in .*mine.toml"
    with pytest.raises(InputError, match=both):
        choose(card("NVIDIA GeForce RTX 3070", (8, 6), 7.78), inputs)
    with pytest.raises(InputError, match=both):
        inputs.profile_of_card("RTX 3070")
    assert choose(card("NVIDIA GeForce RTX 3090", (8, 6), 23.7), inputs).profile.name == "rtx3090_24gb"


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Planned:
    """The plan of `auto` for a wide BERT on a card."""

    def plan(hardware: Hardware, *assignments: str) -> Plan:
        monkeypatch.setattr("hwopt.planning.request.detect", lambda *_: hardware)
        given = [SMALL_BERT, "data.train=missing.csv", "data.max_length=512", *assignments]
        monkeypatch.chdir(tmp_path)
        return api.resolve("auto", assignments=given, cache=tmp_path / "cache")

    return plan


@pytest.mark.filterwarnings("ignore")
def test_card_without_a_profile_gets_the_largest_micro_batch_that_fits(planned: Planned) -> None:
    """By the forecast for the model of the job, and not by the ratio of the memories. The rows of a step are the parent's."""
    hardware = card("NVIDIA A100-SXM4-40GB MIG 1g.10gb", (8, 0), 9.5)
    plan = planned(hardware)
    smallest = min((each for each in GPU_PROFILES if each.card.capability == (8, 0)), key=lambda each: each.card.memory_gib)
    assert plan.profile.name == f"auto-{smallest.name}"
    assert plan.batch.train == 64 if IS_PINNED else plan.batch.train in (64, 96)  # the memory depends on the version of torch
    assert plan.batch.step == 128
    assert planned(hardware, "plugins.batch.train=4").batch.train == 4


@pytest.mark.filterwarnings("ignore")
def test_reason_for_the_rows_leaves_out_the_pool_that_yields_to_them(planned: Planned) -> None:
    plan = planned(card("NVIDIA A100-SXM4-40GB MIG 1g.5gb", (8, 0), 3.4), "data.max_length=128")
    reason = next(entry.reason for entry in plan.entries if entry.name == "batch")
    needed, usable = re.findall(r"[0-9.]+(?= of| GiB)", reason)[:2]
    assert float(needed) <= float(usable), reason


def test_memory_that_cannot_be_forecast_scales_the_micro_batch(planned: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hwopt.memory.forecast.planner.trace_plan", Mock(side_effect=NotTraceable("for the test")))
    plan = planned(card("NVIDIA GeForce RTX 2080 Ti", (7, 5), 10.75))
    assert (plan.profile.name, plan.batch.train, plan.batch.step) == ("t4_16gb", 11, 32)
    assert any("cannot be forecast" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("name", "amd", "gib", "profile"),
    [
        ("AMD Instinct MI300X", "gfx942", 191.98, "mi300x_192gb"),
        ("AMD Radeon RX 7900 XTX", "gfx1100", 23.98, "rx7900xtx_24gb"),
        ("AMD Radeon RX 7900 XT", "gfx1100", 19.98, "auto-rx7900xtx_24gb"),
        ("AMD Instinct MI250X", "gfx90a", 63.98, "auto-mi300x_192gb"),
    ],
)
def test_amd_gpu_is_not_taken_for_an_nvidia_one(name: str, amd: str, gib: float, profile: str) -> None:
    hardware = replace(card(name, (9, 4), gib), compute_capability=None, amd=amd)
    assert choose(hardware, INPUTS).profile.name == profile
    assert not hardware.can("tf32")
    assert hardware.can("bf16")
    assert hardware.architecture == {"gfx942": "CDNA 3", "gfx90a": "CDNA 2", "gfx1100": "RDNA 3"}[amd]


def test_gpu_that_shares_the_memory_of_its_host_has_nothing_to_offload(planned: Planned) -> None:
    """NVIDIA GB10: expandable segments fail, and pinned copies and offloading gain nothing."""
    spark = replace(card("NVIDIA GB10", (12, 1), 119.7), unified_memory=True)
    plan = planned(
        spark, "plugins.allocator.enabled=true", "plugins.checkpointing.offload=true", "plugins.checkpointing.layers=all"
    )
    found = {entry.name: entry for entry in plan.entries}
    assert found["allocator"].decision == "skip"
    assert (found["checkpointing"].decision, found["checkpointing"].options.offload) == ("fallback", False)
    assert found["dataloader"].options.pin_memory is False
    context = plan.context
    offered = [
        choice.changes
        for entry in plan.entries
        for scale in entry.plugin.alternatives(entry.options, context)
        for choice in scale.choices
    ]
    assert not [changes for changes in offered if changes.get("offload") or "paged" in str(changes)]


@pytest.mark.parametrize("name", Inputs().files)
def test_card_that_a_profile_names_as_a_variant_has_its_peaks(name: str) -> None:
    """In a profile of its own, in that profile, or in one derived from another."""
    profile = Inputs().profile(name)
    for variant in profile.card.variants:
        for match in variant.match:
            hardware = card(match, profile.card.capability or (0, 0), profile.card.memory_gib or 0.0)
            found = choose(hardware, INPUTS).profile.card
            peaks = found.variant_named(match) or found
            assert (peaks.memory_bandwidth_gbps, peaks.dense_tflops) == (variant.memory_bandwidth_gbps, variant.dense_tflops)


def test_unknown_card_has_no_peaks() -> None:
    unknown = choose(card("NVIDIA RTX 6000 of some year", (8, 9), 47.0), INPUTS).profile.card
    assert (unknown.memory_bandwidth_gbps, unknown.dense_tflops.fp16) == (None, None)
