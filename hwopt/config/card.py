"""Card: the vendor's figures for a card, and for the variants that the same profile serves."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated

from pydantic import Field

from hwopt.config.job_values import Table
from hwopt.hardware.device import Hardware

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(gt=0)]

SAME_CARD_WITHIN = 0.2
"""Relative difference in memory up to which a card of the profile's name is its card: V100 and A100 have two sizes."""


class DenseTflops(Table):
    """Dense tensor-core peaks with fp32 accumulation, in TFLOP/s; absent if the card has no such path."""

    fp16: Positive | None = None
    bf16: Positive | None = None
    tf32: Positive | None = None
    fp32: Positive | None = None


class CardVariant(Table):
    """A card with the memory and the kernels of the profile's card, and with other peaks."""

    match: tuple[str, ...] = Field(min_length=1)
    """Parts of the device name that CUDA reports, in whole words."""
    multiprocessors: Count | None = None
    memory_bandwidth_gbps: Positive | None = None
    """None if the vendor does not state it, or if it differs between machines (laptops); then times are not predicted."""
    dense_tflops: DenseTflops = DenseTflops()


class Card(Table):
    """The vendor's figures for the card. Memory and capability that the machine reports win over them."""

    match: tuple[str, ...] = ()
    """Parts of the device name that CUDA reports, in whole words."""
    memory_gib: Positive | None = None
    """Total memory as CUDA reports it, which is less than the vendor states."""
    compute_capability: str | None = Field(default=None, pattern=r"^[0-9]{1,2}\.[0-9]$")
    multiprocessors: Count | None = None
    """Streaming multiprocessors, on which the memory of some kernels depends."""
    memory_bandwidth_gbps: Positive | None = None
    dense_tflops: DenseTflops = DenseTflops()
    variants: tuple[CardVariant, ...] = ()
    """Other cards that this profile serves. The longest name that matches wins."""

    @property
    def capability(self) -> tuple[int, int] | None:
        if self.compute_capability is None:
            return None
        major, minor = self.compute_capability.split(".")
        return int(major), int(minor)

    def variant_named(self, device: str) -> Card | None:
        """The figures of the variant called `device`; None if no variant matches better than the card itself."""
        best = max(self.variants, key=lambda variant: longest_match(variant.match, device), default=None)
        if best is None or longest_match(best.match, device) <= longest_match(self.match, device):
            return None
        facts = {key: getattr(best, key) for key in ("match", "multiprocessors", "memory_bandwidth_gbps", "dense_tflops")}
        return self.model_copy(update=facts | {"variants": ()})

    def longest_name(self, device: str) -> int:
        """The length of the longest match of the card or of a variant in the name `device`; 0 if none matches."""
        return max(longest_match(match, device) for match in (self.match, *(variant.match for variant in self.variants)))

    def describes(self, hardware: Hardware) -> bool:
        """Whether `hardware` is this card, or a variant of it with the same memory."""
        same = self.capability == hardware.compute_capability and self.memory_gib is not None and self.same_memory(hardware)
        return same and self.longest_name(hardware.name) > 0

    def same_memory(self, hardware: Hardware) -> bool:
        """Whether `hardware` has about the memory of this card; a memory limit does not count."""
        if self.memory_gib is None or hardware.memory_limit_gib is not None:
            return True
        return abs(self.memory_gib - hardware.memory_gib) <= SAME_CARD_WITHIN * self.memory_gib


def longest_match(parts: Iterable[str], device: str) -> int:
    """The length of the longest of `parts` that the name `device` contains in whole words; 0 without one."""
    return max((len(part) for part in parts if re.search(rf"(?<!\w){re.escape(part)}(?!\w)", device)), default=0)
