"""What the machine has, detected or described, and what each compute capability can do, each fact with its reason.

Sources: CUDA C++ Programming Guide, "Compute Capabilities"; NVIDIA's Turing, Ampere, Ada and Hopper white papers; the checks
of torch's scaled_dot_product_attention (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp).
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Literal

from hwopt.errors import InputError

GIB = 1024**3

Feature = Literal["fp16", "bf16", "tf32", "flash_attention", "efficient_attention", "cudnn_attention", "fused_optimizer"]

ARCHITECTURES = (  # first compute capability of each, newest first
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
    # torch.cuda.is_bf16_supported() says True on older cards too, by emulation
    "bf16": ((8, 0), "bf16 tensor cores came with Ampere"),
    "tf32": ((8, 0), "TF32 came with Ampere"),
    "flash_attention": ((8, 0), "torch's flash kernel needs Ampere"),
    "efficient_attention": ((5, 0), "torch's memory-efficient kernel needs Maxwell"),
    "cudnn_attention": ((8, 0), "torch's cudnn kernel needs Ampere"),
    "fused_optimizer": ((3, 5), "any CUDA device that torch supports"),
}

PACKAGES = (
    *("torch", "accelerate", "transformers", "datasets", "peft", "bitsandbytes", "torchao"),
    *("deepspeed", "liger-kernel", "flash-attn", "triton", "numpy", "pydantic"),
)


@dataclass(frozen=True)
class Capability:
    """Whether a feature is there, with the reason in both numbers; true and false like a bool."""

    ok: bool
    reason: str

    def __bool__(self) -> bool:
        return self.ok


@dataclass(frozen=True)
class Hardware:
    """One machine: `count` equal devices of a kind and the host around them. Memory in GiB (2**30 bytes)."""

    device_type: Literal["cuda", "cpu"]
    name: str
    memory_gib: float
    free_memory_gib: float
    count: int = 1
    compute_capability: tuple[int, int] | None = None
    cpu_cores: int = 1
    cpu_memory_gib: float = 0.0
    cpu_features: tuple[str, ...] = ()
    """Of amx_bf16, avx512_bf16, avx2: what matters to torch's CPU kernels."""
    compiler: str | None = None
    """A C++ compiler on the path, for torch.compile."""
    system: str = "Linux"
    source: Literal["detected", "described"] = "detected"
    memory_limit_gib: float | None = None
    """The allocator's limit, where the user asked for less than the device has; `memory_gib` is that already."""

    @property
    def architecture(self) -> str:
        if self.compute_capability is None:
            return "CPU"
        return next(name for least, name in ARCHITECTURES if self.compute_capability >= least)

    @property
    def capability_text(self) -> str:
        return ".".join(map(str, self.compute_capability)) if self.compute_capability else "none"

    def can(self, feature: Feature) -> Capability:
        """Whether the device does `feature` in hardware (never by emulation)."""
        if self.compute_capability is None:
            return self._cpu_can(feature)
        least, why = NEEDED_CAPABILITY[feature]
        found = f"compute capability {self.capability_text} ({self.name})"
        if self.compute_capability >= least:
            return Capability(True, found)
        return Capability(False, f"needs compute capability {least[0]}.{least[1]} ({why}), found {found}")

    def _cpu_can(self, feature: Feature) -> Capability:
        match feature:
            case "bf16":
                units = [unit for unit in ("amx_bf16", "avx512_bf16") if unit in self.cpu_features]
                if units:
                    return Capability(True, f"this CPU has {', '.join(units)}")
                return Capability(False, "this CPU has neither AMX-BF16 nor AVX512-BF16")
            case "flash_attention" | "fused_optimizer":
                return Capability(True, "torch has a CPU kernel")
            case "fp16":
                return Capability(
                    False, "no CUDA device; fp16 on a CPU has no fast kernels, Accelerate would silently train in fp32"
                )
            case _:
                return Capability(
                    False,
                    f"needs a CUDA device of compute capability {'.'.join(map(str, NEEDED_CAPABILITY[feature][0]))}, found a CPU",
                )


def described(name: str, compute_capability: tuple[int, int] | None, memory_gib: float, host: Hardware | None = None) -> Hardware:
    """A card that is not there, in the machine of `host` (default: 8 cores, 32 GiB). All of its memory counts as free."""
    return Hardware(
        device_type="cuda" if compute_capability else "cpu",
        name=name,
        memory_gib=memory_gib,
        free_memory_gib=memory_gib,
        compute_capability=compute_capability,
        cpu_cores=host.cpu_cores if host else 8,
        cpu_memory_gib=host.cpu_memory_gib if host else 32.0,
        compiler=host.compiler if host else "g++",
        system=host.system if host else "Linux",
        source="described",
    )


UNITS = {"GiB": 1.0, "MiB": 1 / 1024, "GB": 1e9 / GIB, "MB": 1e6 / GIB}


def gib_of(limit: str) -> float:
    """What --memory-limit says ("8GiB", "7500MB"). Raises InputError for what is no size."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", limit.strip())
    if found is None or found[2] not in UNITS or float(found[1]) == 0:
        raise InputError(
            f"--memory-limit {limit[:40]!r}: expected a number above 0 with a unit of {', '.join(UNITS)}, such as 8GiB"
        )
    return float(found[1]) * UNITS[found[2]]


def limited(hardware: Hardware, limit: str) -> Hardware:
    """`hardware` as if its device had only `limit` ("8GiB", "7500MB"). Raises InputError for what cannot be held to."""
    gib = gib_of(limit)
    if hardware.device_type == "cpu":
        raise InputError(
            f"--memory-limit {limit}: limits the allocator of a CUDA device, and there is none; torch's "
            "CPU allocator has no limit. Leave it out, or plan for a card with `hwopt plan --profile NAME`"
        )
    if gib > hardware.memory_gib:
        raise InputError(f"--memory-limit {limit}: is more than the {hardware.memory_gib:g} GiB of {hardware.name}")
    free = min(gib, hardware.free_memory_gib)
    return replace(hardware, memory_gib=round(gib, 2), free_memory_gib=round(free, 2), memory_limit_gib=gib)


def detect(index: int = 0) -> Hardware:
    """Look at the machine: the CUDA device `index` of those that are visible, or the CPU. Imports torch.

    Raises InputError where this torch has no kernels for the device.
    """
    import torch

    host = detect_host()
    if not torch.cuda.is_available():
        return host
    index = index if index < torch.cuda.device_count() else 0
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    if not has_kernels(capability, torch.cuda.get_arch_list()):
        raise InputError(
            f"torch {torch.__version__} has no kernels for {properties.name} "
            f"(compute capability {capability[0]}.{capability[1]}); it was built for {', '.join(torch.cuda.get_arch_list())}. "
            "Install a build that carries it: "
            "for Volta (V100) one of CUDA 12.6, https://pytorch.org/get-started/locally"
        )
    free, total = torch.cuda.mem_get_info(index)
    return Hardware(
        device_type="cuda",
        name=properties.name,
        memory_gib=round(total / GIB, 2),
        free_memory_gib=round(free / GIB, 2),
        count=torch.cuda.device_count(),
        compute_capability=capability,
        cpu_cores=host.cpu_cores,
        cpu_memory_gib=host.cpu_memory_gib,
        cpu_features=host.cpu_features,
        compiler=host.compiler,
        system=host.system,
    )


def has_kernels(capability: tuple[int, int], architectures: Sequence[str]) -> bool:
    """Whether a build for `architectures` ("sm_80", "compute_90") runs on a device: same major, or PTX that is older.

    An empty list (a build that does not say) counts as yes.
    """
    for name in architectures:
        kind, _, digits = name.partition("_")
        number = re.match(r"\d+", digits)
        if number is None:
            continue
        built = (int(number[0][:-1]), int(number[0][-1]))
        if built <= capability and (kind == "compute" or built[0] == capability[0]):
            return True
    return not architectures


GROUPS, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
"""Where Linux says what a container may use."""


def host_memory() -> tuple[int, int]:
    """(bytes of the host's memory, bytes of it that are free), of which a container may be given a part only."""
    import psutil

    found = psutil.virtual_memory()
    given, used = given_memory()
    if given is None or given >= found.total:
        return int(found.total), int(found.available)
    return given, max(0, min(int(found.available), given - used))


def given_memory(groups: Path = GROUPS, own: Path = OWN_GROUPS) -> tuple[int | None, int]:
    """(the fewest bytes that this process's control groups may use, None where nothing says so; bytes that they do use).

    Cached files do not count: they go when they must. https://docs.kernel.org/admin-guide/cgroup-v2.html, and version 1.
    """
    found: list[tuple[int, int]] = []
    with contextlib.suppress(OSError):
        for _, controllers, path in (line.split(":", 2) for line in own.read_text(encoding="utf-8").splitlines()):
            old = "memory" in controllers.split(",")
            names = ("limit_in_bytes", "usage_in_bytes", "total_inactive_file") if old else ("max", "current", "inactive_file")
            group = groups / ("memory" if old else "") / path.lstrip("/")
            for place in (group, *group.parents) if old or not controllers else ():
                with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
                    most, used = (int((place / f"memory.{name}").read_text()) for name in names[:2])
                    stat = dict(line.split() for line in (place / "memory.stat").read_text().splitlines())
                    found.append((most, used - int(stat.get(names[2], 0))))
    return min(found, key=lambda group: group[0], default=(None, 0))


def detect_host() -> Hardware:
    """The machine without its accelerators."""
    import torch

    memory, free = host_memory()
    flags = {
        "amx_bf16": "_is_amx_tile_supported",
        "avx512_bf16": "_is_avx512_bf16_supported",
        "avx2": "_is_avx2_supported",
    }
    return Hardware(
        device_type="cpu",
        name=cpu_name(),
        memory_gib=round(memory / GIB, 2),
        free_memory_gib=round(free / GIB, 2),
        cpu_cores=cpu_cores(),
        cpu_memory_gib=round(memory / GIB, 2),
        cpu_features=tuple(name for name, probe in flags.items() if getattr(torch.cpu, probe, bool)()),
        compiler=next((name for name in ("g++", "clang++", "cl") if shutil.which(name)), None),
        system=platform.system(),
    )


def cpu_cores() -> int:
    """The cores that this process may use, which on a shared machine are fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine() or "CPU"


def detect_software() -> dict[str, str]:
    """Versions of the installed packages that plugins ask about."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
