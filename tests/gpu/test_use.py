"""How well a run uses a CUDA device: what is measured, and verdicts whose cause the driver of a pretend card makes."""

import itertools
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from event_calls import calling

from hwopt.config.profile import Profile, make_profile
from hwopt.config.toml import Document
from hwopt.hardware.cuda_memory import release_unused_memory
from hwopt.hardware.device import GIB
from hwopt.plugin import RunView
from hwopt.testing import Recorder, plan_for, tiny_job, tiny_profile, train_tiny
from hwopt.training.telemetry import step_timer, use

pytestmark = pytest.mark.device("pretend")

MEASURED = {"gpu_percent", "memory_busy_percent", "memory_gib", "power_watts", "temperature_celsius", "clock_mhz", "cpu_percent"}
TIMED = {"host_ms_per_micro_batch", "device_ms_per_micro_batch", "device_waits_share", "forward_share", "update_share"}
WSL = "5.15.153.1-microsoft-standard-WSL2"
MIB = 2**20


@pytest.fixture(autouse=True)
def judged_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of any length have a verdict, every step is timed, and waits for the tiny data do not count."""
    monkeypatch.setattr(use, "ENOUGH_SECONDS", 0.0)
    monkeypatch.setattr(step_timer, "PERIOD", 0.0)
    monkeypatch.setattr("hwopt.training.telemetry.verdict.DATA_WAIT", 1.1)


@pytest.fixture(autouse=True)
def no_cached_memory() -> Iterator[None]:
    """Every test begins and ends with an empty cache of the allocator, and without models of earlier tests."""
    release_unused_memory()
    yield
    release_unused_memory()


def trained(
    folder: Path, profile: Profile | None = None, each_step: Callable[[], None] | None = None, steps: int = 4
) -> Recorder:
    """The recorder of a run, in which `each_step` is called before every step."""
    profile = profile or tiny_profile(dataloader={"num_workers": 0})
    plan = plan_for(profile, tiny_job(folder / "data", max_steps=steps, logging_steps=1))
    if each_step is not None:

        def call(view: RunView) -> None:
            each_step()

        plan.recipe.events.append(calling(on_step_begin=call))
    return train_tiny(plan, folder)


def card_profile() -> Profile:
    """A tiny profile with the peaks of the RTX 3070, so that the MFU is known."""
    card = {"match": ["GeForce RTX 3070"], "dense_tflops": {"fp16": 40.6, "bf16": 40.6, "tf32": 20.3, "fp32": 20.3}}
    plugins: dict[str, Any] = {"batch": {"train": 4, "gradient_accumulation_steps": 2}, "dataloader": {"num_workers": 0}}
    return make_profile(Document("a tiny card", {"name": "tiny", "card": card, "plugins": plugins}))


def test_a_tiny_model_is_host_bound(tmp_path: Path) -> None:
    """A pretend card is never busy, as a fast card with a tiny model: all that is left is the host's time."""
    summary = trained(tmp_path).summary
    assert summary["use"].keys() >= MEASURED | TIMED
    assert summary["use"]["device_waits_share"] == 1
    assert summary["verdict"]["limit"] == "host-bound"
    assert "plugins.batch.train = 8 (fewer, larger micro-batches)" in summary["verdict"]["next"]
    assert summary["gpu_utilization"] == 50, "what the pretend NVML reports"


@pytest.mark.parametrize(
    ("memory_percent", "limit", "figure"),
    [
        ("91", "memory-bound", "the memory of the GPU was busy 91 % of the time at 0% of its peak arithmetic"),
        ("12", "compute-bound", "the GPU was used 98 % of the time, MFU 0%"),
    ],
)
def test_kernels_slower_than_their_launches_keep_the_device_busy(
    memory_percent: str, limit: str, figure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host launches faster than the device computes. NVML tells which part of the device is busy."""
    monkeypatch.setenv("PRETEND_SLOWDOWN", "4")
    monkeypatch.setenv("PRETEND_GPU_PERCENT", "98")
    monkeypatch.setenv("PRETEND_MEMORY_PERCENT", memory_percent)
    summary = trained(tmp_path, card_profile()).summary
    assert summary["use"]["device_waits_share"] == 0
    assert summary["use"]["device_ms_per_micro_batch"] > summary["use"]["host_ms_per_micro_batch"]
    assert (summary["verdict"]["limit"], summary["verdict"]["figure"]) == (limit, figure)
    assert summary["verdict"]["next"].startswith("plugins.precision.dtype"), "the tiny model computes in fp32"


def test_a_driver_that_moves_memory_to_the_host_makes_a_run_spilling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On WSL the driver hands out memory of the host when the card is full: torch then holds more than the card has."""
    monkeypatch.setattr(platform, "release", lambda: WSL)
    monkeypatch.setenv("PRETEND_SHARED_MIB", "16384")
    total, held = torch.cuda.get_device_properties(0).total_memory, list[torch.Tensor]()

    def fill_the_card() -> None:
        if not held:
            held.append(torch.empty(total, dtype=torch.uint8, device="cuda"))

    heard = trained(tmp_path, each_step=fill_the_card)
    held.clear()
    assert heard.summary["verdict"]["limit"] == "spilling"
    assert heard.summary["verdict"]["figure"] == "memory was short at 100% of the log points: the driver moved memory to the host"
    assert heard.summary["verdict"]["next"].startswith("plugins.batch.train = 2 (smaller micro-batches")
    assert any("the driver moved memory to the host at two log points in a row" in text for text in heard.warnings)


def test_an_allocator_that_frees_its_cache_in_each_step_makes_a_run_spilling(tmp_path: Path) -> None:
    """Free segments of another size fill the card: the allocator gives them back and asks the driver again."""

    larger = itertools.count(320 * MIB, 64 * MIB)

    def fragment() -> None:
        size = 256 * MIB
        held = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(torch.cuda.mem_get_info()[0] // size)]
        del held
        torch.empty(next(larger), dtype=torch.uint8, device="cuda")  # no free segment is as large

    before = torch.cuda.memory_stats().get("num_alloc_retries", 0)
    heard = trained(tmp_path, each_step=fragment)
    # after two signs in a row hwopt empties the cache itself
    assert torch.cuda.memory_stats()["num_alloc_retries"] - before >= 2
    assert any("the allocator had to free its cache at two log points in a row" in text for text in heard.warnings)
    verdict = heard.summary["verdict"]
    assert verdict["limit"] == "spilling"
    assert verdict["figure"].endswith("% of the log points: the allocator had to free its cache")


def test_a_run_with_room_on_wsl_does_not_spill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "release", lambda: WSL)
    monkeypatch.setenv("PRETEND_SHARED_MIB", "16384")
    heard = trained(tmp_path)
    assert torch.cuda.memory_reserved() < GIB
    assert heard.summary["verdict"]["limit"] == "host-bound"
