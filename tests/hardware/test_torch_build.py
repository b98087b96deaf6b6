from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

from hwopt.hardware import torch_build
from hwopt.hardware.device import GIB
from hwopt.hardware.torch_build import (
    Driver,
    NvidiaCard,
    fix,
    has_kernels,
    missing_kernels,
    nvidia_driver,
    torch_problem,
)

T4 = NvidiaCard("T4", (7, 5))
CU130 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]
"""torch.cuda.get_arch_list() of torch 2.13.0+cu130."""


@pytest.mark.parametrize(
    ("capability", "built", "expected"),
    [
        ((7, 0), ["sm_75", "sm_80", "sm_90", "compute_90"], False),
        ((8, 6), ["sm_80"], True),
        ((8, 0), ["sm_86"], False),
        ((12, 0), ["sm_90", "compute_90"], True),
        ((12, 0), ["sm_90"], False),
        ((10, 0), ["sm_100a"], True),
        ((10, 3), ["sm_100a"], False),
        ((10, 3), ["sm_100f"], True),
        ((11, 0), ["compute_100f"], False),
        ((8, 6), [], True),
        *(((major, minor), CU130, (major, minor) >= (7, 5)) for major, minor in ((7, 0), (7, 5), (12, 9))),
    ],
)
def test_torch_build_supports_a_card(capability: tuple[int, int], built: list[str], expected: bool) -> None:
    assert has_kernels(capability, built) is expected


INSTALL = 'Install another build: pip install --force-reinstall "{}" --index-url https://download.pytorch.org/whl/{}'


@pytest.mark.parametrize(
    ("release", "capability", "cuda", "wanted", "tag"),
    [
        ("2.13.0+cpu", (7, 5), (13, 0), "torch==2.13.0", "cu130"),
        ("2.13.0+cu130", (7, 0), (13, 0), "torch==2.13.0", "cu126"),  # CUDA 13 has dropped Volta
        ("2.15.1", (7, 0), (13, 0), "torch>=2.10,<2.15", "cu126"),  # the last release with these wheels is 2.14
        ("2.13.0+cu130", (8, 6), (12, 4), "torch==2.13.0", "cu126"),  # an older driver
        ("2.13.0", (12, 0), (12, 8), "torch>=2.10,<2.12", "cu128"),  # CUDA 12.6 has no Blackwell
        ("2.14.0.dev20260801+cpu", (9, 0), (13, 2), "torch>=2.10", "cu130"),  # nightly builds are elsewhere
    ],
)
def test_command_installs_a_build_for_card_and_driver(
    release: str, capability: tuple[int, int] | None, cuda: tuple[int, int] | None, wanted: str, tag: str
) -> None:
    assert fix(release, capability, cuda) == INSTALL.format(wanted, tag)


def test_old_card_and_old_driver_have_no_command() -> None:
    assert fix("2.13.0+cpu", (3, 5), (11, 4)).endswith("To train on the CPU, set CUDA_VISIBLE_DEVICES=-1")
    assert fix("2.13.0+cpu", (8, 6), (11, 4)) == "Update the NVIDIA driver to 580 or newer, which supports CUDA 13"
    assert fix("2.13.0+cpu", (7, 0), (11, 4)) == "Update the NVIDIA driver to 525 or newer, which supports CUDA 12"


def test_missing_kernels_name_the_card_and_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_build, "nvidia_driver", lambda: Driver("580.65", (13, 0), (NvidiaCard("V100", (7, 0)),)))
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    assert missing_kernels("RTX 3070", (8, 6), CU130) == ""
    problem = missing_kernels("Tesla V100", (7, 0), CU130)
    assert problem == (
        "torch 2.13.0+cu130 has no kernels for Tesla V100 (compute capability 7.0); it was built for "
        f"sm_75, sm_80, sm_86, sm_90, sm_100, sm_120. {INSTALL.format('torch==2.13.0', 'cu126')}"
    )


@pytest.mark.parametrize(
    ("built_for", "driver", "expected"),
    [
        (
            None,
            Driver("580.65", (13, 0), (T4,)),
            "is built for CPUs, but this machine has an NVIDIA driver (580.65) and T4",
        ),
        (None, Driver(), "is built for CPUs, but this machine has an NVIDIA driver: hwopt runs on the CPU."),
        (None, None, None),
        (
            "13.0",
            Driver("550.54", (12, 4), (T4,)),
            "is built for CUDA 13.0, but this machine has an NVIDIA driver (550.54)",
        ),
        ("12.8", Driver("550.54", (12, 4), (T4,)), None),  # the same major version is enough
        ("13.0", None, None),
    ],
)
def test_torch_that_sees_no_card(
    built_for: str | None, driver: Driver | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.setattr(torch_build, "nvidia_driver", lambda: driver)
    problem = torch_problem(environment={})
    assert (expected is None and problem == "") or (expected is not None and expected in problem and "pip install" in problem)
    for hidden in ("", "-1"):
        assert torch_problem(environment={"CUDA_VISIBLE_DEVICES": hidden}) == ""


@pytest.mark.parametrize("sign", ["file", "nvidia-smi", "none"])
@pytest.mark.parametrize("error", [pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED])
def test_driver_without_a_management_library(error: int, sign: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise pynvml.NVMLError(error)

    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    monkeypatch.setattr(torch_build, "DRIVER_FILE", tmp_path / "version")
    monkeypatch.setattr(torch_build, "WSL_FOLDER", str(tmp_path / "wsl"))
    monkeypatch.setenv("PATH", str(tmp_path))
    if sign == "file":
        (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15")
    if sign == "nvidia-smi":
        (tmp_path / "nvidia-smi").write_text("#!/bin/sh\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    # a program without a loaded driver is on images for machines with and without a card
    found = sign == "file" or (sign == "nvidia-smi" and error == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    assert (nvidia_driver() is not None) == found


def test_driver_of_nvml_lists_every_card(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = (NvidiaCard("Tesla T4", (7, 5), 14.56, 14.0), NvidiaCard("NVIDIA GeForce RTX 3090", (8, 6), 23.7, 20.5))
    stubs: dict[str, Any] = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: cards[index],
        "nvmlSystemGetDriverVersion": lambda: "580.65",
        "nvmlSystemGetCudaDriverVersion_v2": lambda: 13000,
        "nvmlDeviceGetName": lambda card: card.name,
        "nvmlDeviceGetMemoryInfo": lambda card: SimpleNamespace(total=card.memory_gib * GIB, free=card.free_memory_gib * GIB),
        "nvmlDeviceGetCudaComputeCapability": lambda card: card.compute_capability,
    }
    for name, stub in stubs.items():
        monkeypatch.setattr(pynvml, name, stub)
    assert nvidia_driver() == Driver("580.65", (13, 0), cards)
