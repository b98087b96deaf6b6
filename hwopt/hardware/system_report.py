"""What a bug report says of the machine: versions, the driver, the CUDA version of the torch build, and every card."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib import metadata

from hwopt.hardware.device import GIB
from hwopt.hardware.torch_build import nvidia_driver

REPORTED = ("tokenizers", "safetensors", "huggingface-hub", "pyarrow", "nvidia-ml-py", "trl")
"""Packages that belong into a bug report although no plan depends on them."""


@dataclass(frozen=True)
class CardReport:
    """One NVIDIA card. Memory in GiB."""

    index: int
    """As NVML and nvidia-smi count; CUDA_VISIBLE_DEVICES does not change it."""
    name: str
    memory_gib: float
    free_memory_gib: float
    compute_capability: str


@dataclass(frozen=True)
class SystemReport:
    """The machine and its software. A version that could not be found is ""."""

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
    cards: tuple[CardReport, ...]


def report_system() -> SystemReport:
    """The report of this machine. Imports torch."""
    import torch

    driver = nvidia_driver()
    return SystemReport(
        version_of("hwopt"),
        f"{platform.python_implementation()} {platform.python_version()}",
        platform.platform(),
        torch.__version__,
        torch.version.cuda or "",
        driver.version if driver else "",
        ".".join(map(str, driver.cuda)) if driver and driver.cuda else "",
        installed_cards(),
    )


def reported_packages() -> dict[str, str]:
    """Package -> version, for the installed ones of REPORTED."""
    return {name: found for name in REPORTED if (found := version_of(name))}


def version_of(package: str) -> str:
    """The version of an installed package, else ""."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def installed_cards() -> tuple[CardReport, ...]:
    """Every NVIDIA card, from NVML; without NVML those that torch sees."""
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            return tuple(nvml_card(index) for index in range(pynvml.nvmlDeviceGetCount()))
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return torch_cards()


def nvml_card(index: int) -> CardReport:
    """A card by NVML's index. NVML is initialised. Raises NVMLError."""
    import pynvml

    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    capability = ".".join(map(str, pynvml.nvmlDeviceGetCudaComputeCapability(handle)))
    return CardReport(
        index, pynvml.nvmlDeviceGetName(handle), round(memory.total / GIB, 2), round(memory.free / GIB, 2), capability
    )


def torch_cards() -> tuple[CardReport, ...]:
    """The cards that torch sees."""
    import torch

    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        one = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        found.append(CardReport(index, one.name, round(total / GIB, 2), round(free / GIB, 2), f"{one.major}.{one.minor}"))
    return tuple(found)
