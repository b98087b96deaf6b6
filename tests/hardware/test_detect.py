from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hwopt.errors import InputError
from hwopt.hardware.detect import cgroup_memory, detect, detect_software
from hwopt.hardware.device import GIB, Hardware, described, weakest, with_memory_limit

CARDS = {  # name: (compute capability, fp16, bf16, tf32, flash)
    "V100": ((7, 0), True, False, False, False),
    "T4": ((7, 5), True, False, False, False),
    "A100": ((8, 0), True, True, True, True),
    "P100": ((6, 0), False, False, False, False),
}


@pytest.mark.parametrize("card", CARDS)
def test_features_follow_from_the_compute_capability(card: str) -> None:
    capability, *expected = CARDS[card]
    hardware = described(card, capability, 16)
    found = [hardware.can(feature) for feature in ("fp16", "bf16", "tf32", "flash_attention")]
    assert [bool(capability) for capability in found] == expected
    for capability_found in found:
        assert card in capability_found.reason, "each fact with its reason"
        if not capability_found:
            assert hardware.capability_text in capability_found.reason
            assert "needs" in capability_found.reason


def test_features_of_an_amd_gpu_follow_from_its_instruction_set() -> None:
    new, old = (described("Radeon", None, 16, amd=amd) for amd in ("gfx1100", "gfx1030"))
    assert new.can("bf16")
    assert old.best_dtype() == ("fp16", "gfx1030 (Radeon); bf16 gfx1030 (Radeon) computes bf16 by emulation")


def test_cpu_has_bf16_only_with_bf16_units() -> None:
    plain = Hardware("cpu", "old", 16, 16, cpu_features=("avx2",))
    fast = Hardware("cpu", "new", 16, 16, cpu_features=("amx_bf16",))
    assert not plain.can("bf16")
    assert fast.can("bf16")
    assert not fast.can("fp16")
    assert "fp32" in fast.can("fp16").reason


def test_memory_limit_replaces_total_and_free_memory() -> None:
    card = described("RTX 3090", (8, 6), 24)
    assert with_memory_limit(card, "8GiB").memory_gib == with_memory_limit(card, "8 GiB").free_memory_gib == 8
    assert with_memory_limit(card, "8589.934592MB").memory_gib == 8
    assert with_memory_limit(card, "8GiB").memory_limit_gib == 8


@pytest.mark.parametrize(
    ("limit", "expected"),
    [("8", "unit"), ("eight GiB", "unit"), ("0GiB", "above 0"), ("32GiB", "exceeds the 24"), ("8gib", "unit")],
)
def test_memory_limit_rejects_invalid_sizes(limit: str, expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        with_memory_limit(described("RTX 3090", (8, 6), 24), limit)
    with pytest.raises(InputError):
        with_memory_limit(Hardware("cpu", "a CPU", 64, 64), limit)


@pytest.mark.usefixtures("real_machine")
def test_detect_returns_this_machine() -> None:
    hardware = detect()
    assert hardware.cpu_cores >= 1
    assert hardware.name not in ("", "Described CPU")
    assert set(hardware.cpu_features) <= {"amx_bf16", "avx512_bf16", "avx2"}
    assert 0 < hardware.free_memory_gib <= hardware.memory_gib
    assert "torch" in detect_software()


@pytest.mark.parametrize("version", [1, 2])
def test_container_memory_is_the_smallest_cgroup_limit(version: int, tmp_path: Path) -> None:
    """Cached files count as free."""
    own, groups = tmp_path / "cgroup", tmp_path / "groups"
    own.write_text("0::/pod/box\n" if version == 2 else "5:cpu:/\n4:memory:/pod/box\n0::/\n")
    names = ("max", "current", "inactive_file") if version == 2 else ("limit_in_bytes", "usage_in_bytes", "total_inactive_file")
    root = groups if version == 2 else groups / "memory"
    for place, most in ((root, "max"), (root / "pod", 32 * GIB), (root / "pod" / "box", 64 * GIB)):
        place.mkdir(parents=True, exist_ok=True)
        for name, value in ((names[0], most), (names[1], 5 * GIB), ("stat", f"anon 7\n{names[2]} {GIB}\n")):
            (place / f"memory.{name}").write_text(str(value))
    assert cgroup_memory(groups, own) == (32 * GIB, 4 * GIB)
    assert cgroup_memory(groups, tmp_path / "nothing") == (None, 0)


def test_different_cards_are_planned_as_the_least_of_both() -> None:
    t4, rtx3090 = described("Tesla T4", (7, 5), 14.56), described("NVIDIA GeForce RTX 3090", (8, 6), 23.7, multiprocessors=82)
    for found in (weakest([t4, rtx3090]), weakest([rtx3090, t4])):
        assert (found.name, found.memory_gib, found.compute_capability) == ("Tesla T4", 14.56, (7, 5))
        assert set(found.different_cards) == {
            "Tesla T4 (14.56 GiB, compute capability 7.5)",
            "NVIDIA GeForce RTX 3090 (23.7 GiB, compute capability 8.6)",
        }
    v100 = described("Tesla V100-SXM2-32GB", (7, 0), 31.7, multiprocessors=80)
    mixed = weakest([v100, rtx3090])
    assert (mixed.memory_gib, mixed.compute_capability, mixed.multiprocessors) == (23.7, (7, 0), 80)
    assert weakest([t4, t4]) == t4
    mi300x, rx7900 = described("MI300X", None, 192.0, amd="gfx942"), described("RX 7900 XTX", None, 24.0, amd="gfx1100")
    mi50 = described("MI50", None, 32.0, amd="gfx906")
    assert [weakest(pair).amd for pair in ([mi300x, rx7900], [rx7900, mi50])] == ["gfx1100", "gfx906"]
    assert not weakest([rx7900, mi50]).can("bf16")
    assert weakest([rx7900, mi50]).different_cards == ("RX 7900 XTX (24 GiB, gfx1100)", "MI50 (32 GiB, gfx906)")


@pytest.mark.parametrize(
    ("hip", "properties", "expected"),
    [
        ("7.0", {"name": "AMD Instinct MI300X", "major": 9, "minor": 4}, {"amd": "gfx942", "compute_capability": None}),
        (None, {"name": "NVIDIA GB10", "is_integrated": 1}, {"unified_memory": True, "compute_capability": (12, 1)}),
        (None, {"name": "NVIDIA GeForce RTX 5090"}, {"unified_memory": False, "amd": ""}),
    ],
)
def test_kind_of_a_card(
    hip: str | None, properties: dict[str, Any], expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """ROCm's build of torch calls AMD GPUs CUDA devices, with a number of its own as their compute capability."""
    found = {"major": 12, "minor": 1, "multi_processor_count": 48, "is_integrated": 0, "gcnArchName": "gfx942:sramecc+:xnack-"}
    monkeypatch.setattr("torch.version.hip", hip)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_arch_list", lambda: ["gfx942"] if hip else ["sm_120"])
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda index: (2 * GIB, 120 * GIB))
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: SimpleNamespace(**found | properties))
    hardware = detect()
    assert {key: getattr(hardware, key) for key in expected} == expected
    assert hardware.problem == ""
    free = 20.0 if expected.get("unified_memory") else 2.0
    assert hardware.free_memory_gib == free, "a driver does not count the host's memory that the system could free"
