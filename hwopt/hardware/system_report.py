"""What a bug report says of the machine: versions, the driver, the CUDA version of the torch build, and every card."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata

from hwopt.hardware.torch_build import Driver, NvidiaCard, nvidia_driver


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
