"""Check that the installed torch can use the NVIDIA cards of this machine, and name the command that installs one that can.

Sources: the "PyTorch CUDA Support Matrix" of pytorch's RELEASE.md, and its changes for 2.11 (pytorch#175253), 2.12 (#182849) and
2.15 (#190385); CUDA C++ Programming Guide, "Application Compatibility"; the drivers' "CUDA Compatibility" guide.
"""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hwopt.hardware.device import GIB

Version = tuple[int, int]


@dataclass(frozen=True)
class Build:
    """A kind of wheels on download.pytorch.org."""

    tag: str
    first_torch: Version
    end_torch: Version
    """The first release without such wheels."""
    lowest: Version
    """Compute capability."""
    highest: Version
    driver: Version
    """The lowest CUDA version that the driver must support."""


NO_LIMIT = (99, 0)
BUILDS = (
    Build("cu130", (2, 10), NO_LIMIT, (7, 5), NO_LIMIT, (13, 0)),
    Build("cu126", (2, 10), (2, 15), (5, 0), (9, 0), (12, 0)),
    Build("cu128", (2, 10), (2, 12), (7, 5), NO_LIMIT, (12, 0)),
)
"""The first suitable one is taken."""
DRIVER_FILE = Path("/proc/driver/nvidia/version")
WSL_FOLDER = "/usr/lib/wsl/lib"


@dataclass(frozen=True)
class NvidiaCard:
    """One card as NVML and nvidia-smi list it, whatever CUDA_VISIBLE_DEVICES says."""

    name: str
    compute_capability: Version
    memory_gib: float = 0.0
    free_memory_gib: float = 0.0


@dataclass(frozen=True)
class Driver:
    """The NVIDIA driver of this machine; empty fields are unknown."""

    version: str = ""
    cuda: Version | None = None
    """The highest CUDA version that the driver supports."""
    cards: tuple[NvidiaCard, ...] = ()

    @property
    def names(self) -> list[str]:
        return [card.name for card in self.cards]

    @property
    def text(self) -> str:
        version = f" ({self.version})" if self.version else ""
        return f"an NVIDIA driver{version}{' and ' if self.cards else ''}{', '.join(self.names)}"


def torch_problem(index: int = 0, environment: Mapping[str, str] = os.environ) -> str:
    """Why the installed torch cannot use the NVIDIA card `index`, with the command that fixes it; empty if it can.

    Imports torch. The user can hide the cards with CUDA_VISIBLE_DEVICES.
    """
    import torch

    if torch.cuda.is_available():
        if torch.version.hip is not None:  # an AMD GPU
            return ""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of a card without kernels, and names no command
            properties = torch.cuda.get_device_properties(index if index < torch.cuda.device_count() else 0)
        return missing_kernels(properties.name, (properties.major, properties.minor), torch.cuda.get_arch_list())
    hidden = environment.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    if hidden or torch.version.hip is not None or (driver := nvidia_driver()) is None:
        return ""
    release = torch.__version__
    if torch.version.cuda is None:
        problem = f"torch {release} is built for CPUs, but this machine has {driver.text}"
    elif driver.cuda is not None and driver.cuda < (int(torch.version.cuda.split(".")[0]), 0):
        machine = f"{driver.text} for CUDA {driver.cuda[0]}.{driver.cuda[1]}"
        problem = f"torch {release} is built for CUDA {torch.version.cuda}, but this machine has {machine}"
    else:
        return ""  # another fault: torch's own message tells
    capability = driver.cards[0].compute_capability if driver.cards else None
    return f"{problem}: hwopt runs on the CPU. {fix(release, capability, driver.cuda)}"


def missing_kernels(name: str, capability: Version, architectures: Sequence[str]) -> str:
    """The problem of a torch without kernels for the card `name`; empty if it has them."""
    import torch

    if has_kernels(capability, architectures):
        return ""
    driver = nvidia_driver() or Driver()
    return (
        f"torch {torch.__version__} has no kernels for {name} (compute capability {capability[0]}.{capability[1]}); "
        f"it was built for {', '.join(architectures)}. {fix(torch.__version__, capability, driver.cuda)}"
    )


def has_kernels(capability: Version, architectures: Sequence[str]) -> bool:
    """Whether a torch build for `architectures` ("sm_80", "compute_90") runs on a device of compute capability `capability`.

    It does with binary code of the same major and the same or an older minor version, and with PTX (compute_*) of the same or an
    older version. Code with the suffix "a" (sm_90a) runs on its own version only. An empty list (unknown) counts as yes.
    """

    def runs(name: str) -> bool:
        found = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", name)
        built = (int(found[2]), int(found[3])) if found else (0, 0)
        if found is None or found[4] == "a":
            return built == capability
        return built <= capability and (built[0] == capability[0] or (found[1] == "compute" and not found[4]))

    return not architectures or any(map(runs, architectures))


def fix(release: str, capability: Version | None, cuda: Version | None) -> str:
    """The sentence with the command that installs a torch for a card of `capability` and a driver for `cuda`; None: unknown.

    The command keeps the installed `release` ("2.13.0+cpu") if there are such wheels of it.
    """
    if capability is not None and capability < (5, 0):
        return "No supported torch has kernels for this card. To train on the CPU, set CUDA_VISIBLE_DEVICES=-1"
    for build in BUILDS:
        fits_card = capability is None or build.lowest <= capability < (build.highest[0] + 1, 0)
        if fits_card and (cuda is None or build.driver <= cuda):
            return f"Install another build: {install_command(release, build)}"
    if capability is not None and capability < (7, 5):
        return "Update the NVIDIA driver to 525 or newer, which supports CUDA 12"
    return "Update the NVIDIA driver to 580 or newer, which supports CUDA 13"


def install_command(release: str, build: Build) -> str:
    """The pip command that installs the wheels of `build`; --force-reinstall, since 2.13.0+cpu satisfies torch==2.13.0."""
    public = release.partition("+")[0]
    numbers = re.match(r"(\d+)\.(\d+)", public)
    version = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    if build.first_torch <= version < build.end_torch and re.fullmatch(r"\d+\.\d+\.\d+", public):
        wanted = f"torch=={public}"
    else:
        limit = "" if build.end_torch == NO_LIMIT else f",<{build.end_torch[0]}.{build.end_torch[1]}"
        wanted = f"torch>={build.first_torch[0]}.{build.first_torch[1]}{limit}"
    return f'pip install --force-reinstall "{wanted}" --index-url https://download.pytorch.org/whl/{build.tag}'


def nvidia_driver() -> Driver | None:
    """The NVIDIA driver of a machine with an NVIDIA card; None without one. Asks NVML, which needs no torch."""
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
            if not handles:
                return None
            number = pynvml.nvmlSystemGetCudaDriverVersion_v2()
            cuda = number // 1000, number % 1000 // 10
            return Driver(pynvml.nvmlSystemGetDriverVersion(), cuda, tuple(map(nvml_card, handles)))
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:  # no library, or the driver is installed, but not loaded
        no_library = error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
        tools = no_library and any(shutil.which("nvidia-smi", path=path) for path in (None, WSL_FOLDER))
        return Driver() if DRIVER_FILE.exists() or tools else None


def nvml_card(handle: Any) -> NvidiaCard:
    """The card of an NVML handle."""
    import pynvml

    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    capability = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    return NvidiaCard(pynvml.nvmlDeviceGetName(handle), capability, round(memory.total / GIB, 2), round(memory.free / GIB, 2))
