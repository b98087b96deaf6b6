"""What a bug report says of the machine: versions, the driver, the CUDA version of the torch build, and every card."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib import metadata

from hwopt.hardware.torch_build import Driver, NvidiaCard, nvidia_driver

REPORTED = ("tokenizers", "safetensors", "huggingface-hub", "pyarrow", "nvidia-ml-py", "trl")
"""Packages that belong into a bug report although no plan depends on them."""


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
    """Package -> version, for the installed ones of REPORTED."""
    return {name: found for name in REPORTED if (found := version_of(name))}


def version_of(package: str) -> str:
    """The version of an installed package, else ""."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
