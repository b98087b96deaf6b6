"""The setting is on inside the block and restored after it; platforms without expandable segments are skipped."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from plugin_cases import Cases, Mutation, release_memory

from hwopt.hardware.device import described
from hwopt.plugin import verify
from hwopt_plugins.allocator import Allocator, allocator_settings, expandable_segments, has_virtual_memory


@pytest.mark.skipif(not hasattr(torch._C, "_accelerator_getAllocatorSettings"), reason="torch 2.10 does not report its settings")
def test_setting_is_restored_after_the_block():
    with expandable_segments():
        assert "expandable_segments:True" in allocator_settings()
        with expandable_segments():
            assert "expandable_segments:True" in allocator_settings()
        assert "expandable_segments:True" in allocator_settings()
    assert "expandable_segments:True" not in allocator_settings()


@pytest.mark.parametrize(
    ("system", "release", "why"),
    [("Linux", "6.8.0-generic", ""), ("Windows", "10", "Linux only"), ("Linux", "5.15.153.1-microsoft-standard-WSL2", "WSL")],
)
def test_only_native_linux_has_virtual_memory(system, release, why):
    able = has_virtual_memory(replace(described("a card", (8, 6), 8.0), system=system), release)
    assert bool(able) == (why == "")
    assert why in able.reason


@pytest.mark.parametrize(
    ("segments", "status"),
    [
        ([], "unknown"),
        ([{"is_expandable": False, "total_size": 2}], "inactive"),
        ([{"is_expandable": True, "total_size": 20}, {"is_expandable": False, "total_size": 2}], "active"),
    ],
)
def test_evidence_reads_the_allocator_segments(monkeypatch, segments, status):
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)  # no CUDA device here
    assert verify(Allocator(Allocator.Options()), SimpleNamespace()).status == status


def no_expandable_segments(patch):
    """torch's allocator ignores its settings, and gives back what it has cached."""
    release_memory()
    patch.setattr(torch._C, "_accelerator_setAllocatorSettings", lambda settings: None)


CASES = Cases(
    hardware=described("a card", (8, 6), 24.0),
    whole="one setting of the process",
    mutations=(
        Mutation("the allocator ignores its settings", no_expandable_segments, "allocator segments are expandable", on_cuda=True),
    ),
)
