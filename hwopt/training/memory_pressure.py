"""Signs that the device's memory is short although nothing has failed yet."""

from __future__ import annotations

import platform
from typing import Any

import torch


class MemoryPressure:
    """Looks for memory pressure at log points; two signs in a row count as running out of memory.

    Signs: the allocator had to free its cache and retry, which is slow; on Windows and WSL the driver moved memory to the host,
    which is slower still. There the driver refuses nothing: torch then holds more than the card has (microsoft/WSL#11050: 30 GiB
    on a card of 16 GiB; MakazhanAlpamys/Soup#649). What other programs hold there is not known: neither CUDA nor NVML says how
    much of it the driver may move away.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.retries = 0 if device.type != "cuda" else retries_of(torch.cuda.memory_stats(device))
        self.signs = 0
        self.seen: set[str] = set()  # the signs so far, in words
        self.log_points = self.short = 0  # log points so far, and those with a sign
        self.may_spill = platform.system() == "Windows" or "microsoft" in platform.release().lower()

    @property
    def share(self) -> float:
        """The part of the log points at which memory was short."""
        return self.short / max(1, self.log_points)

    def message(self) -> str | None:
        """What to tell the user after two signs in a row, else None."""
        if self.device.type != "cuda":
            return None
        stats = torch.cuda.memory_stats(self.device)
        total = torch.cuda.get_device_properties(self.device).total_memory
        return self.judge(retries_of(stats), int(stats.get("reserved_bytes.all.current", 0)), total)

    def judge(self, retries: int, reserved: int, total: int) -> str | None:
        """`message` for the allocator's retries so far, its reserved bytes and the device's bytes."""
        spills = self.may_spill and reserved > total
        sign = "the driver moved memory to the host" if spills else "the allocator had to free its cache"
        short = spills or retries > self.retries
        if short:
            self.seen.add(sign)
        self.log_points, self.short = self.log_points + 1, self.short + short
        self.signs = self.signs + 1 if short else 0
        self.retries = retries
        if self.signs < 2:
            return None
        self.signs = 0
        return f"{sign} at two log points in a row"


def retries_of(stats: dict[str, Any]) -> int:
    """How often the allocator has freed its cache and asked the driver again."""
    return int(stats.get("num_alloc_retries", 0))
