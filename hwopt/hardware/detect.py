"""Detect the hardware and software of this machine. Imports torch."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from hwopt.hardware.cuda_memory import release_unused_memory
from hwopt.hardware.device import GIB, Hardware, weakest
from hwopt.hardware.layer_speed import LARGEST, cached, measured
from hwopt.hardware.torch_build import Driver, NvidiaCard, nvidia_driver, torch_problem

PACKAGES = (
    *("torch", "accelerate", "transformers", "datasets", "peft", "bitsandbytes", "torchao"),
    *("deepspeed", "liger-kernel", "flash-attn", "triton", "numpy", "pydantic"),
)


def detect(index: int = 0, local_ranks: int = 1) -> Hardware:
    """The hardware of this machine: the visible CUDA device `index`, or the CPU. Imports torch.

    With several `local_ranks`, rank n uses device n. If their cards differ, the result is the weakest of them in each
    respect. Its `problem` tells if the installed torch cannot use the NVIDIA cards of this machine.
    """
    import torch

    host = replace(detect_host(), problem=torch_problem(index))
    if not torch.cuda.is_available():
        return host
    count = torch.cuda.device_count()
    index = index if index < count else 0
    release_unused_memory()
    free, total = torch.cuda.mem_get_info(index)
    own = card(index, free, total, host)
    if own.unified_memory:  # the driver does not count memory that the system would free for it
        own = replace(own, free_memory_gib=min(host.free_memory_gib, own.memory_gib))
    # mem_get_info creates a context on the device, so the free memory of other ranks' cards is not asked
    others = [other for other in range(min(local_ranks, count)) if other != index]
    totals = [torch.cuda.get_device_properties(other).total_memory for other in others]
    return weakest([own, *(card(other, free, size, host) for other, size in zip(others, totals, strict=True))])


def card(index: int, free: int, total: int, host: Hardware) -> Hardware:
    """The CUDA or ROCm device `index` in the machine `host`, with at most `free` of its `total` bytes free."""
    import torch

    properties = torch.cuda.get_device_properties(index)
    amd = properties.gcnArchName.partition(":")[0] if torch.version.hip else ""
    return replace(
        host,
        device_type="cuda",
        name=properties.name or f"AMD {amd}",
        memory_gib=round(total / GIB, 2),
        free_memory_gib=round(min(free, total) / GIB, 2),
        count=torch.cuda.device_count(),
        compute_capability=None if amd else (properties.major, properties.minor),
        amd=amd,
        unified_memory=bool(properties.is_integrated),
        multiprocessors=properties.multi_processor_count,
    )


def host_memory() -> tuple[int, int]:
    """(total, free) bytes of host memory; inside a container, of the container's limit."""
    import psutil

    found = psutil.virtual_memory()
    limit, used = cgroup_memory()
    if limit is None or limit >= found.total:
        return int(found.total), int(found.available)
    return limit, max(0, min(int(found.available), limit - used))


def cgroup_memory(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> tuple[int | None, int]:
    """(smallest memory limit of this process's control groups or None without a limit, bytes in use under that limit).

    Cached files do not count as used: the kernel evicts them when memory is needed. Supports cgroup versions 1 and 2.
    Source: https://docs.kernel.org/admin-guide/cgroup-v2.html
    """
    found: list[tuple[int, int]] = []
    with contextlib.suppress(OSError):
        for _, controllers, path in (line.split(":", 2) for line in own.read_text(encoding="utf-8").splitlines()):
            old = "memory" in controllers.split(",")
            names = ("limit_in_bytes", "usage_in_bytes", "total_inactive_file") if old else ("max", "current", "inactive_file")
            group = root / ("memory" if old else "") / path.lstrip("/")
            for place in (group, *group.parents) if old or not controllers else ():
                with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
                    limit, used = (int((place / f"memory.{name}").read_text()) for name in names[:2])
                    stat = dict(line.split() for line in (place / "memory.stat").read_text().splitlines())
                    found.append((limit, used - int(stat.get(names[2], 0))))
    return min(found, key=lambda group: group[0], default=(None, 0))


def detect_host() -> Hardware:
    """The host without its accelerators, as a CPU device."""
    memory, free = host_memory()
    return Hardware(
        device_type="cpu",
        name=cpu_name(),
        memory_gib=round(memory / GIB, 2),
        free_memory_gib=round(free / GIB, 2),
        cpu_cores=cpu_cores(),
        cpu_memory_gib=round(memory / GIB, 2),
        cpu_features=cpu_features(),
        compiler=next((name for name in ("g++", "clang++", "cl") if shutil.which(name)), None),
        system=platform.system(),
    )


def with_layer_speed(hardware: Hardware, hidden_size: int, world_size: int, cache: Path) -> Hardware:
    """`hardware` with the speed at which its CPU trains a layer of `hidden_size`: measured once, then from `cache`.

    Not for a size that is unknown (0) or too large, nor for several processes, which could measure different times.
    """
    import torch

    usable = hardware.device_type == "cpu" and hardware.source == "detected" and world_size == 1
    if not usable or not 0 < hidden_size <= LARGEST:
        return hardware
    told = hardware.name, hardware.cpu_features, torch.get_num_threads(), torch.__version__, hidden_size
    name = hashlib.sha256(repr(told).encode()).hexdigest()[:16]
    speed = cached(cache / "layers" / f"{name}.json", lambda: measured(hidden_size, bool(hardware.can("bf16"))))
    return replace(hardware, layer=speed)


def has_apple_gpu() -> bool:
    """Whether torch can use the GPU of an Apple computer. Imports torch."""
    import torch

    return torch.backends.mps.is_available()


def cpu_features() -> tuple[str, ...]:
    """Of amx_bf16, avx512_bf16 and avx2, those that torch's CPU kernels use. Imports torch."""
    import torch

    flags = {"amx_bf16": "_is_amx_tile_supported", "avx512_bf16": "_is_avx512_bf16_supported", "avx2": "_is_avx2_supported"}
    return tuple(name for name, probe in flags.items() if getattr(torch.cpu, probe, bool)())


def cpu_cores() -> int:
    """The number of cores that this process may use, which can be less than the machine has."""
    return len(os.sched_getaffinity(0))


def cpu_name() -> str:
    """The model name of the CPU, else its architecture."""
    with contextlib.suppress(OSError):  # not Linux
        if found := re.search(r"^model name\s*:(.*)", Path("/proc/cpuinfo").read_text("utf-8", "replace"), re.M):
            return found[1].strip()
    return platform.processor() or platform.machine() or "CPU"


def detect_software() -> dict[str, str]:
    """Package -> version, for the installed ones of PACKAGES."""
    return installed_versions(PACKAGES)


@dataclass(frozen=True)
class SystemReport:
    """What a bug report says of the machine and its software. A version that could not be found is ""."""

    hwopt: str
    python: str
    operating_system: str
    torch: str
    """With its build, such as 2.13.0+cu130."""
    torch_cuda: str
    """The CUDA version that torch was built for; "" for a build for CPUs."""
    driver: str
    driver_cuda: str
    """The highest CUDA version that the driver supports."""
    cards: tuple[NvidiaCard, ...]


def report_system() -> SystemReport:
    """The report of this machine. Imports torch."""
    import torch

    driver = nvidia_driver() or Driver()
    return SystemReport(
        version_of("hwopt"),
        f"{platform.python_implementation()} {platform.python_version()}",
        platform.platform(),
        torch.__version__,
        torch.version.cuda or "",
        driver.version,
        ".".join(map(str, driver.cuda or ())),
        driver.cards,
    )


def reported_packages() -> dict[str, str]:
    """Package -> version, for the packages that hwopt needs."""
    needed = (re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in metadata.requires("hwopt") or () if "extra ==" not in line)
    return installed_versions(needed)


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Package -> version, for those of `packages` that are installed."""
    return {name: found for name in packages if (found := version_of(name))}


def version_of(package: str) -> str:
    """The version of an installed package, else ""."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
