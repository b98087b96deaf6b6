"""The hardware of a machine, detected or described, and the features of each compute capability, with reasons.

Sources: CUDA C++ Programming Guide, "Compute Capabilities"; NVIDIA's Turing, Ampere, Ada and Hopper white papers; the checks
of torch's scaled_dot_product_attention (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hwopt.errors import InputError
from hwopt.hardware.layer_speed import LayerSpeed

GIB = 1024**3

Feature = Literal[
    "fp16", "bf16", "tf32", "flash_attention", "efficient_attention", "cudnn_attention", "fused_optimizer", "triton", "offload"
]

AMD_ARCHITECTURES = {  # name of the instruction set -> architecture
    "gfx906": "Vega",
    "gfx908": "CDNA",
    "gfx90a": "CDNA 2",
    "gfx942": "CDNA 3",
    "gfx950": "CDNA 4",
    "gfx1030": "RDNA 2",
    "gfx1100": "RDNA 3",
    "gfx1101": "RDNA 3",
    "gfx1200": "RDNA 4",
    "gfx1201": "RDNA 4",
}
AMD_FLASH = ("gfx90a", "gfx942", "gfx950")
"""Those for which torch's flash and memory-efficient kernels (AOTriton) are not marked as experimental."""
AMD_WITHOUT_BF16 = ("gfx906", "gfx1030")
AMD_FEATURES: tuple[Feature, ...] = ("bf16", "flash_attention")
"""What not all AMD GPUs have, the most important first."""

ARCHITECTURES = (  # (lowest compute capability, name), newest first
    ((10, 0), "Blackwell"),
    ((9, 0), "Hopper"),
    ((8, 9), "Ada"),
    ((8, 0), "Ampere"),
    ((7, 5), "Turing"),
    ((7, 0), "Volta"),
    ((6, 0), "Pascal"),
    ((0, 0), "older"),
)

NEEDED_CAPABILITY: dict[str, tuple[tuple[int, int], str]] = {
    "fp16": ((7, 0), "tensor cores for fp16 came with Volta"),
    # torch.cuda.is_bf16_supported() returns True on older cards too, by emulation
    "bf16": ((8, 0), "bf16 tensor cores came with Ampere"),
    "tf32": ((8, 0), "TF32 came with Ampere"),
    "flash_attention": ((8, 0), "torch's flash kernel needs Ampere"),
    "efficient_attention": ((5, 0), "torch's memory-efficient kernel needs Maxwell"),
    "cudnn_attention": ((8, 0), "torch's cudnn kernel needs Ampere"),
    "triton": ((7, 0), "Triton needs Volta"),
    "fused_optimizer": ((3, 5), "any CUDA device that torch supports"),
}


@dataclass(frozen=True)
class Support:
    """Whether a feature is supported, with the reason; usable as a bool."""

    ok: bool
    reason: str

    def __bool__(self) -> bool:
        return self.ok


@dataclass(frozen=True)
class Hardware:
    """One machine: `count` devices and their host. Memory in GiB (2**30 bytes).

    If the ranks of this machine use different cards, the fields describe the least of them each (`weakest`).
    """

    device_type: Literal["cuda", "cpu"]
    name: str
    memory_gib: float
    free_memory_gib: float
    count: int = 1
    compute_capability: tuple[int, int] | None = None
    cpu_cores: int = 1
    cpu_memory_gib: float = 0.0
    cpu_features: tuple[str, ...] = ()
    """Of amx_bf16, avx512_bf16, avx2: the ones that torch's CPU kernels use."""
    compiler: str | None = None
    """A C++ compiler on the path, for torch.compile."""
    system: str = "Linux"
    source: Literal["detected", "described"] = "detected"
    problem: str = ""
    """Why the installed torch cannot use the NVIDIA cards of this machine, with the command that fixes it."""
    multiprocessors: int = 0
    """Streaming multiprocessors of the GPU; 0 if unknown, and for a CPU."""
    memory_limit_gib: float | None = None
    """The allocator's limit, if the user gave --memory-limit; `memory_gib` is then this limit too."""
    layer: LayerSpeed | None = None
    """How fast this CPU trains a layer of the model's size; None if it was not measured, and for a GPU."""
    amd: str = ""
    """The instruction set of an AMD GPU, such as "gfx942"; it has no compute capability."""
    unified_memory: bool = False
    """Whether the GPU uses the host's memory (NVIDIA GB10, Jetson): `free_memory_gib` is then the host's."""
    different_cards: tuple[str, ...] = ()
    """The cards of the ranks if they differ: "Tesla T4 (14.56 GiB, compute capability 7.5)"."""

    @property
    def different_cards_note(self) -> str:
        """What a plan for different cards means, as a sentence; "" if the ranks use equal ones."""
        cards = ", ".join(self.different_cards)
        what = "The plan is for the least memory and capability of them, and every rank runs it"
        return f"different cards: {cards}. {what}" if cards else ""

    @property
    def architecture(self) -> str:
        """The name of the GPU's architecture, such as "Ampere", or "CPU"."""
        if self.amd:
            return AMD_ARCHITECTURES.get(self.amd, "AMD")
        if self.compute_capability is None:
            return "CPU"
        return next(name for lowest, name in ARCHITECTURES if self.compute_capability >= lowest)

    @property
    def capability_text(self) -> str:
        """The compute capability as "8.6", the instruction set of an AMD GPU, or "none"."""
        return ".".join(map(str, self.compute_capability)) if self.compute_capability else self.amd or "none"

    def can(self, feature: Feature) -> Support:
        """Whether the device supports `feature` in hardware; emulation does not count."""
        if feature == "offload":
            if self.device_type == "cpu":
                return Support(False, "needs a CUDA device, found a CPU")
            shared = f"{self.name} and its host share one memory"
            return Support(not self.unified_memory, shared if self.unified_memory else "the host has memory of its own")
        if self.amd:
            return self._amd_can(feature)
        if self.compute_capability is None:
            return self._cpu_can(feature)
        needed, reason = NEEDED_CAPABILITY[feature]
        found = f"compute capability {self.capability_text} ({self.name})"
        if self.compute_capability >= needed:
            return Support(True, found)
        return Support(False, f"needs compute capability {needed[0]}.{needed[1]} ({reason}), found {found}")

    def best_dtype(self) -> tuple[Literal["fp16", "bf16", "fp32"], str]:
        """(dtype, reason): bf16 if the device supports it, else fp16, else fp32; the reason says why the others are not used."""
        bf16, fp16 = self.can("bf16"), self.can("fp16")
        if bf16:
            return "bf16", bf16.reason
        if fp16:
            return "fp16", f"{fp16.reason}; bf16 {bf16.reason}"
        return "fp32", f"neither bf16 ({bf16.reason}) nor fp16 ({fp16.reason})"

    def _amd_can(self, feature: Feature) -> Support:
        found = f"{self.amd} ({self.name})"
        match feature:
            case "tf32" | "cudnn_attention":
                return Support(False, f"a feature of NVIDIA GPUs, found {found}")
            case "bf16":
                able = self.amd not in AMD_WITHOUT_BF16
                return Support(able, found if able else f"{found} computes bf16 by emulation")
            case "flash_attention" | "efficient_attention":
                able = self.amd in AMD_FLASH
                return Support(able, found if able else f"torch's kernel for {found} is experimental")
            case _:
                return Support(True, found)

    def _cpu_can(self, feature: Feature) -> Support:
        match feature:
            case "bf16":
                units = ", ".join(unit for unit in ("amx_bf16", "avx512_bf16") if unit in self.cpu_features)
                return Support(bool(units), f"this CPU has {units or 'neither AMX-BF16 nor AVX512-BF16'}")
            case "flash_attention" | "fused_optimizer":
                return Support(True, "torch has a CPU kernel")
            case "fp16":
                return Support(False, "CPUs have no fast fp16 kernels, Accelerate would silently train in fp32")
            case _:
                needed = ".".join(map(str, NEEDED_CAPABILITY[feature][0]))
                return Support(False, f"needs a CUDA device of compute capability {needed}, found a CPU")


def weakest(cards: Sequence[Hardware]) -> Hardware:
    """The least memory, capability and multiprocessors of `cards`: every rank must be able to run the same plan.

    It has the name of the card with the least memory, of equal ones that with the lowest compute capability.
    """
    if len({(card.name, card.memory_gib, card.capability_text) for card in cards}) == 1:
        return cards[0]
    capabilities = [card.compute_capability for card in cards if card.compute_capability is not None]
    least = min(cards, key=lambda card: (card.memory_gib, card.compute_capability or (0, 0)))
    return replace(
        least,
        free_memory_gib=min(card.free_memory_gib for card in cards),
        compute_capability=min(capabilities, default=None),
        amd=min(cards, key=lambda card: [card.can(feature).ok for feature in AMD_FEATURES]).amd,
        multiprocessors=min(card.multiprocessors for card in cards),
        different_cards=tuple(
            f"{each.name} ({each.memory_gib:g} GiB, {each.amd or f'compute capability {each.capability_text}'})" for each in cards
        ),
    )


def described(
    name: str,
    compute_capability: tuple[int, int] | None,
    memory_gib: float,
    host: Hardware | None = None,
    multiprocessors: int | None = None,
    amd: str = "",
) -> Hardware:
    """Hardware for a device that is not installed, in the machine `host` (default: 8 cores, 32 GiB); all its memory is free."""
    host = host or Hardware("cpu", "", 32.0, 32.0, cpu_cores=8, cpu_memory_gib=32.0, compiler="g++")
    return Hardware(
        "cuda" if compute_capability or amd else "cpu",
        name,
        memory_gib,
        free_memory_gib=memory_gib,
        compute_capability=compute_capability,
        amd=amd,
        multiprocessors=multiprocessors or 0,
        cpu_cores=host.cpu_cores,
        cpu_memory_gib=host.cpu_memory_gib,
        compiler=host.compiler,
        system=host.system,
        source="described",
    )


UNITS = {"GiB": 1.0, "MiB": 1 / 1024, "GB": 1e9 / GIB, "MB": 1e6 / GIB}


def parse_memory_limit(limit: str) -> float:
    """The value of --memory-limit ("8GiB", "7500MB") in GiB. Raises InputError if it is not a size."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", limit.strip())
    if match is None or match[2] not in UNITS or float(match[1]) == 0:
        raise InputError(
            f"--memory-limit {limit[:40]!r}: expected a number above 0 with a unit of {', '.join(UNITS)}, such as 8GiB"
        )
    return float(match[1]) * UNITS[match[2]]


def with_memory_limit(hardware: Hardware, limit: str) -> Hardware:
    """`hardware` with its device memory reduced to `limit` ("8GiB", "7500MB"). Raises InputError if that is impossible."""
    gib = parse_memory_limit(limit)
    if hardware.device_type == "cpu":
        why = "this machine has no CUDA device, and torch cannot limit CPU memory"
        raise InputError(f"--memory-limit {limit}: {why}. Omit the option, or plan for a card with `hwopt plan --profile NAME`")
    if gib > hardware.memory_gib:
        raise InputError(f"--memory-limit {limit}: exceeds the {hardware.memory_gib:g} GiB of {hardware.name}")
    free = min(gib, hardware.free_memory_gib)
    return replace(hardware, memory_gib=round(gib, 2), free_memory_gib=round(free, 2), memory_limit_gib=gib)
