"""Card: the vendor's figures for a card, and for the variants that the same profile serves; cards.toml has further cards."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
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
    """Streaming multiprocessors, on which the memory of some kernels depends."""
    memory_bandwidth_gbps: Positive | None = None
    """None if the vendor does not state it, or if it differs between machines (laptops); then times are not predicted."""
    dense_tflops: DenseTflops = DenseTflops()


class KnownCard(CardVariant):
    """A card of cards.toml, which has no profile."""

    memory_gib: Positive | None = None
    """As CUDA reports it; only for cards that exist with several sizes."""


class Card(CardVariant):
    """The vendor's figures for the card. Memory and capability that the machine reports win over them."""

    match: tuple[str, ...] = ()
    memory_gib: Positive | None = None
    """Total memory as CUDA reports it, which is less than the vendor states."""
    compute_capability: str | None = Field(default=None, pattern=r"^[0-9]{1,2}\.[0-9]$")
    amd: str | None = Field(default=None, pattern=r"^gfx[0-9a-f]+$")
    """The instruction set of an AMD GPU, which has no compute capability."""
    variants: tuple[CardVariant, ...] = ()
    """Other cards that this profile serves. The longest name that matches wins."""

    @property
    def capability(self) -> tuple[int, int] | None:
        if self.compute_capability is None or self.amd:
            return None
        major, minor = self.compute_capability.split(".")
        return int(major), int(minor)

    def variant_named(self, device: str) -> Card | None:
        """The figures of the variant called `device`; None if no variant matches better than the card itself.

        A laptop's version of a desktop card has no peaks: clocks and power differ from machine to machine.
        """
        if is_laptop(device) and (name := self.name_in(device)) and not is_laptop(name):
            return self.model_copy(update=NO_PEAKS)
        best = max(self.variants, key=lambda variant: longest_match(variant.match, device), default=None)
        if best is None or longest_match(best.match, device) <= longest_match(self.match, device):
            return None
        facts = {key: getattr(best, key) for key in ("match", "multiprocessors", "memory_bandwidth_gbps", "dense_tflops")}
        return self.model_copy(update=facts | {"variants": ()})

    def name_in(self, device: str) -> str:
        """The longest name of the card or of a variant in the name `device`; "" if it has none."""
        names = (*self.match, *(name for variant in self.variants for name in variant.match))
        return max((name for name in names if longest_match([name], device)), key=len, default="")

    def describes(self, hardware: Hardware) -> bool:
        """Whether `hardware` is this card, or a variant of it with the same memory."""
        same = (self.capability, self.amd or "") == (hardware.compute_capability, hardware.amd) and self.memory_gib is not None
        return same and self.same_memory(hardware) and bool(self.name_in(hardware.name))

    def same_memory(self, hardware: Hardware) -> bool:
        """Whether `hardware` has about the memory of this card; a memory limit does not count."""
        if self.memory_gib is None or hardware.memory_limit_gib is not None:
            return True
        return abs(self.memory_gib - hardware.memory_gib) <= SAME_CARD_WITHIN * self.memory_gib


NO_PEAKS = {"variants": (), "multiprocessors": None, "memory_bandwidth_gbps": None, "dense_tflops": DenseTflops()}


def is_laptop(device: str) -> bool:
    """Whether CUDA's name of a device is that of a laptop's card, or of one with less power."""
    return "Laptop" in device or "Max-Q" in device


@cache
def known_cards() -> tuple[KnownCard, ...]:
    text = files("hwopt.config").joinpath("cards.toml").read_text(encoding="utf-8")
    return tuple(KnownCard.model_validate(table) for table in tomllib.loads(text)["cards"])


def known_card(hardware: Hardware) -> KnownCard | None:
    """The card of cards.toml that `hardware` is; None if it is not there."""

    def fits(card: KnownCard) -> bool:
        return card.memory_gib is None or abs(card.memory_gib - hardware.memory_gib) < SAME_CARD_WITHIN / 2 * card.memory_gib

    matching = [card for card in known_cards() if longest_match(card.match, hardware.name) and fits(card)]
    return None if is_laptop(hardware.name) else max(matching, key=lambda card: len(card.match[0]), default=None)


def longest_match(parts: Iterable[str], device: str) -> int:
    """The length of the longest of `parts` that the name `device` contains in whole words; 0 without one."""
    return max((len(part) for part in parts if re.search(rf"(?<!\w){re.escape(part)}(?!\w)", device)), default=0)
