from __future__ import annotations

import pytest

from hwopt.errors import InputError
from hwopt.hardware import Hardware, described, detect, detect_software, has_kernels, limited

CARDS = {  # name: (compute capability, fp16, bf16, tf32, flash)
    "V100": ((7, 0), True, False, False, False),
    "T4": ((7, 5), True, False, False, False),
    "A100": ((8, 0), True, True, True, True),
    "RTX 3070": ((8, 6), True, True, True, True),
    "L4": ((8, 9), True, True, True, True),
    "H100": ((9, 0), True, True, True, True),
    "P100": ((6, 0), False, False, False, False),
}


@pytest.mark.parametrize("card", CARDS)
def test_what_each_capability_can(card: str) -> None:
    capability, *expected = CARDS[card]
    hardware = described(card, capability, 16)
    found = [hardware.can(feature) for feature in ("fp16", "bf16", "tf32", "flash_attention")]  # type: ignore[arg-type]
    assert [bool(capability) for capability in found] == expected
    for capability_found in found:
        assert card in capability_found.reason, "each fact with its reason"
        if not capability_found:
            assert hardware.capability_text in capability_found.reason
            assert "needs" in capability_found.reason


def test_a_cpu_has_bf16_only_with_the_units_for_it() -> None:
    plain = Hardware("cpu", "old", 16, 16, cpu_features=("avx2",))
    fast = Hardware("cpu", "new", 16, 16, cpu_features=("amx_bf16",))
    assert not plain.can("bf16")
    assert fast.can("bf16")
    assert not fast.can("fp16")
    assert "fp32" in fast.can("fp16").reason


@pytest.mark.parametrize(
    ("capability", "built", "expected"),
    [
        ((7, 0), ["sm_75", "sm_80", "sm_90", "compute_90"], False),
        ((7, 0), ["sm_70", "sm_80"], True),
        ((8, 6), ["sm_80"], True),
        ((8, 0), ["sm_86"], False),
        ((12, 0), ["sm_90", "compute_90"], True),
        ((10, 0), ["sm_100a"], True),
        ((8, 6), [], True),
    ],
)
def test_which_builds_carry_a_card(capability: tuple[int, int], built: list[str], expected: bool) -> None:
    assert has_kernels(capability, built) is expected


def test_a_memory_limit() -> None:
    card = described("RTX 3090", (8, 6), 24)
    assert limited(card, "8GiB").memory_gib == limited(card, "8 GiB").free_memory_gib == 8
    assert limited(card, "8589.934592MB").memory_gib == 8
    assert limited(card, "8GiB").memory_limit_gib == 8


@pytest.mark.parametrize(
    ("limit", "expected"),
    [("8", "unit"), ("eight GiB", "unit"), ("0GiB", "above 0"), ("32GiB", "more than the 24"), ("8gib", "unit")],
)
def test_limits_that_cannot_be_held_to(limit: str, expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        limited(described("RTX 3090", (8, 6), 24), limit)
    with pytest.raises(InputError):
        limited(Hardware("cpu", "a CPU", 64, 64), limit)


def test_detecting_this_machine() -> None:
    hardware = detect()
    assert hardware.cpu_cores >= 1
    assert 0 < hardware.free_memory_gib <= hardware.memory_gib
    assert "torch" in detect_software()
