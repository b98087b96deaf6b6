"""What `hwopt doctor --report` says of the machine in a bug report."""

import io
import platform
from dataclasses import replace

import pytest
import torch

import hwopt
from hwopt.hardware import detect
from hwopt.hardware.detect import report_system, reported_packages
from hwopt.hardware.torch_build import Driver, NvidiaCard
from hwopt.planning.capabilities import survey
from hwopt.report.doctor import show_survey
from hwopt.report.terminal import Terminal

CARDS = (NvidiaCard("Tesla T4", (7, 5), 14.56, 14.0), NvidiaCard("NVIDIA GeForce RTX 3090", (8, 6), 23.7, 20.5))


def test_report_has_the_versions_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect, "nvidia_driver", lambda: Driver("580.65", (13, 0), CARDS))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    found = report_system()
    assert (found.hwopt, found.python.split()[1]) == (hwopt.__version__, platform.python_version())
    assert platform.system() in found.operating_system or platform.machine() in found.operating_system
    assert (found.torch_cuda, found.driver, found.driver_cuda, found.cards) == ("13.0", "580.65", "13.0", CARDS)


def test_report_of_a_machine_without_a_driver_has_empty_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect, "nvidia_driver", lambda: None)
    monkeypatch.setattr(torch.version, "cuda", None)
    found = report_system()
    assert (found.torch_cuda, found.driver, found.driver_cuda) == ("", "", "")
    assert {"tokenizers", "safetensors"} <= set(reported_packages())


def test_screen_shows_versions_driver_and_every_card() -> None:
    found = survey()
    system = replace(found.system, driver="580.65", driver_cuda="13.0", torch_cuda="12.6", cards=CARDS)
    screen = Terminal(file=io.StringIO(), width=200)
    show_survey(screen, replace(found, system=system))
    lines = screen.file.getvalue().splitlines()
    assert lines[0].startswith(f"hwopt: {hwopt.__version__}, CPython {platform.python_version()}, ")
    assert f"torch: {torch.__version__}, built for CUDA 12.6" in lines
    assert "driver: 580.65, for CUDA up to 13.0" in lines
    assert "card 0: Tesla T4, 14 of 14.56 GiB free, compute capability 7.5" in lines
    assert "card 1: NVIDIA GeForce RTX 3090, 20.5 of 23.7 GiB free, compute capability 8.6" in lines
    assert any(line.startswith("software: torch ") for line in lines)
    assert any(line.startswith("plugin ") for line in lines)
