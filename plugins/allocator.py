"""Expandable segments: the CUDA allocator grows its segments in place, which reduces fragmentation with varying batch sizes.

Tensors need the same memory as before; only memory lost to fragmentation is saved.

Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf.
Hardware: a CUDA device on Linux. Windows and WSL lack the virtual memory management that it needs.
Cost: negligible time; CUDA tensors cannot be shared between processes.
Numerical effect: none.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager

from hwopt import plugin as hw
from hwopt.hardware.device import Hardware, Support

SETTING = "expandable_segments"


def has_virtual_memory(hardware: Hardware, release: str | None = None) -> Support:
    """Whether the CUDA allocator can grow a segment in place. `release`: the kernel release; default this machine's."""
    if hardware.device_type != "cuda":
        return Support(False, "needs the CUDA allocator, found a CPU")
    if hardware.unified_memory:
        return Support(False, f"expandable segments fail on {hardware.name}, which uses the host's memory")
    if hardware.system != "Linux":
        return Support(False, f"torch supports expandable segments on Linux only, found {hardware.system}")
    if "microsoft" in (platform.release() if release is None else release).lower():
        return Support(False, "needs virtual memory management, which the WSL driver lacks")
    return Support(True, "the CUDA allocator on Linux grows segments in place")


def allocator_settings() -> str:
    """The allocator's settings, as `PYTORCH_ALLOC_CONF` writes them. torch 2.10 cannot report them: read from the variables."""
    import torch

    if hasattr(torch._C, "_accelerator_getAllocatorSettings"):
        return str(torch._C._accelerator_getAllocatorSettings())
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")


@contextmanager
def expandable_segments() -> Iterator[None]:
    """Turn on expandable segments inside the block, and restore the previous allocator settings afterwards."""
    import torch

    before = allocator_settings()
    torch._C._accelerator_setAllocatorSettings(f"{SETTING}:True")
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(before or f"{SETTING}:False")


class Allocator(hw.Plugin):
    name = "allocator"
    stage = hw.Stage.PROCESS
    effect = "bits"

    def probe(self, context: hw.Context) -> hw.Decision:
        capability = has_virtual_memory(context.hardware)
        return hw.Decision.apply(capability.reason) if capability else hw.Decision.skip(capability.reason)

    def apply(self, recipe: hw.Recipe, context: hw.Context) -> None:
        recipe.process.append(expandable_segments)

    def evidence(self, run: hw.RunView) -> hw.Evidence:
        import torch

        segments = torch.cuda.memory_snapshot()
        expandable = [segment for segment in segments if segment.get("is_expandable")]
        size, whole = (sum(segment["total_size"] for segment in group) for group in (expandable, segments))
        share = size / max(1, whole)
        seen = f"{len(expandable)} of {len(segments)} allocator segments are expandable, with {share:.0%} of the memory"
        if not segments:
            return hw.Evidence.unknown(seen)
        # the others may hold tensors of earlier work of the process
        return hw.Evidence.of(share > 0.5, seen)
