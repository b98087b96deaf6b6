"""Signs that the device's memory is short although nothing has failed yet."""

from __future__ import annotations

import gc
import platform
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from hwopt.training.run import Run


class MemoryPressure:
    """Signs that memory is short although nothing has failed, asked at log points.

    An allocator that has to free its cache and try again is slow; on Windows and WSL the driver moves what does not fit into the
    host's memory, which is slower still. Two signs in a row count as running out of memory.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.retries = 0
        self.signs = 0
        self.may_spill = platform.system() == "Windows" or "microsoft" in platform.release().lower()

    def seen(self) -> str | None:
        """What to say once there were two signs in a row."""
        if self.device.type != "cuda":
            return None
        stats = torch.cuda.memory_stats(self.device)
        total = torch.cuda.get_device_properties(self.device).total_memory
        return self.judged(int(stats.get("num_alloc_retries", 0)), int(stats.get("reserved_bytes.all.current", 0)), total)

    def judged(self, retries: int, reserved: int, total: int) -> str | None:
        spills = self.may_spill and reserved > total
        sign = "memory spills into the host's" if spills else "the allocator had to free its cache to go on"
        self.signs = self.signs + 1 if spills or retries > self.retries else 0
        self.retries = retries
        if self.signs < 2:
            return None
        self.signs = 0
        return f"{sign} twice in a row"


def free_memory(run: Run) -> None:
    gc.collect()
    if run.device.type == "cuda":
        torch.cuda.empty_cache()
