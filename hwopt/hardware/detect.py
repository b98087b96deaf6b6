"""Detect the hardware and software of this machine. Imports torch."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from hwopt.errors import InputError
from hwopt.hardware.device import GIB, Hardware

PACKAGES = (
    *("torch", "accelerate", "transformers", "datasets", "peft", "bitsandbytes", "torchao"),
    *("deepspeed", "liger-kernel", "flash-attn", "triton", "numpy", "pydantic"),
)


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


GROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
"""Where Linux says what a container may use."""


def host_memory() -> tuple[int, int]:
    """(bytes of the host's memory, bytes of it that are free), of which a container may be given a part only."""
    import psutil

    found = psutil.virtual_memory()
    given, used = cgroup_memory()
    if given is None or given >= found.total:
        return int(found.total), int(found.available)
    return given, max(0, min(int(found.available), given - used))


def cgroup_memory(groups: Path = GROUPS, own: Path = OWN_CGROUPS) -> tuple[int | None, int]:
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
