"""What `hwopt doctor --report` says of the machine in a bug report."""

from __future__ import annotations

import io
import platform
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

import hwopt
from hwopt.hardware import system_report
from hwopt.hardware.device import GIB
from hwopt.hardware.system_report import CardReport, installed_cards, report_system, reported_packages
from hwopt.hardware.torch_build import Driver
from hwopt.planning.capabilities import survey
from hwopt.report.terminal import Terminal, show_survey

CARDS = (CardReport(0, "Tesla T4", 14.56, 14.0, "7.5"), CardReport(1, "NVIDIA GeForce RTX 3090", 23.7, 20.5, "8.6"))


def test_report_has_the_versions_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_report, "nvidia_driver", lambda: Driver("580.65", (13, 0), ("Tesla T4",), (7, 5)))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    found = report_system()
    assert (found.hwopt, found.python.split()[1]) == (hwopt.__version__, platform.python_version())
    assert platform.system() in found.operating_system or platform.machine() in found.operating_system
    assert (found.torch_cuda, found.driver, found.driver_cuda) == ("13.0", "580.65", "13.0")


def test_report_of_a_machine_without_a_driver_has_empty_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_report, "nvidia_driver", lambda: None)
    monkeypatch.setattr(torch.version, "cuda", None)
    found = report_system()
    assert (found.torch_cuda, found.driver, found.driver_cuda) == ("", "", "")


def test_packages_outside_of_plans_are_reported() -> None:
    assert {"tokenizers", "safetensors"} <= set(reported_packages())


def test_every_card_of_nvml_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = [SimpleNamespace(total=card.memory_gib * GIB, free=card.free_memory_gib * GIB) for card in CARDS]
    stubs: dict[str, Any] = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda index: CARDS[index].name,
        "nvmlDeviceGetMemoryInfo": lambda index: memory[index],
        "nvmlDeviceGetCudaComputeCapability": lambda index: tuple(map(int, CARDS[index].compute_capability.split("."))),
    }
    for name, stub in stubs.items():
        monkeypatch.setattr(pynvml, name, stub)
    assert installed_cards() == CARDS


def test_without_nvml_the_cards_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(name="T4", major=7, minor=5))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (3 * GIB, 15 * GIB))
    assert installed_cards() == (CardReport(0, "T4", 15.0, 3.0, "7.5"),)


def test_screen_shows_versions_driver_and_every_card() -> None:
    found = survey()
    system = replace(found.system, driver="580.65", driver_cuda="13.0", torch_cuda="12.6", cards=CARDS)
    screen = Terminal(file=io.StringIO(), width=200)
    show_survey(screen, replace(found, system=system))
    lines = screen.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines[0].startswith(f"hwopt: {hwopt.__version__}, CPython {platform.python_version()}, ")
    assert f"torch: {torch.__version__}, built for CUDA 12.6" in lines
    assert "driver: 580.65, for CUDA up to 13.0" in lines
    assert "card 0: Tesla T4, 14 of 14.56 GiB free, compute capability 7.5" in lines
    assert "card 1: NVIDIA GeForce RTX 3090, 20.5 of 23.7 GiB free, compute capability 8.6" in lines
    assert any(line.startswith("software: torch ") for line in lines)
    assert any(line.startswith("plugin ") for line in lines)
