"""Expandable segments: CUDA's allocator grows its blocks in place, so that batches of changing sizes leave fewer holes.

Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf. Hardware: a CUDA
device whose platform has virtual memory management: Linux, not Windows or WSL. Cost: none to speak of; memory handles cannot be
shared between processes. Numerical effect: none. Memory: what fragmentation takes, not what tensors need.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager

from hwopt.hardware.device import Capability, Hardware
from hwopt.plugin import Context, Decision, Evidence, Plugin, Recipe, RunView, Stage

SETTING = "expandable_segments"


def has_virtual_memory(hardware: Hardware, release: str | None = None) -> Capability:
    """Whether the platform can grow a block in place; `release` is the kernel's, of this machine where left out."""
    if hardware.device_type != "cuda":
        return Capability(False, "a setting of CUDA's allocator, found a CPU")
    if hardware.system != "Linux":
        return Capability(
            False, f"grows blocks by virtual memory management, which torch uses on Linux only; found {hardware.system}"
        )
    if "microsoft" in (platform.release() if release is None else release).lower():
        return Capability(False, "grows blocks by virtual memory management, which the driver of WSL has not")
    return Capability(True, "CUDA on Linux grows blocks in place")


@contextmanager
def expandable_segments() -> Iterator[None]:
    """From here on the allocator grows its blocks; as before behind the block (PYTORCH_ALLOC_CONF may have said so too)."""
    import torch

    before = torch._C._accelerator_getAllocatorSettings()
    torch._C._accelerator_setAllocatorSettings(f"{SETTING}:True")
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(before or f"{SETTING}:False")


class Allocator(Plugin):
    name = "allocator"
    stage = Stage.PROCESS
    preserves = "bits"

    def probe(self, context: Context) -> Decision:
        able = has_virtual_memory(context.hardware)
        return Decision.apply(able.reason) if able else Decision.skip(able.reason)

    def apply(self, recipe: Recipe, context: Context) -> None:
        recipe.process.append(expandable_segments)

    def evidence(self, run: RunView) -> Evidence:
        import torch

        segments = torch.cuda.memory_snapshot()
        grown = sum(bool(segment.get("is_expandable")) for segment in segments)
        seen = f"{grown} of {len(segments)} segments of the allocator are expandable"
        if not segments:
            return Evidence.unknown(seen)
        return Evidence.active(seen) if grown else Evidence.inactive(seen)
