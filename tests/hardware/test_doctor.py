"""Each check of `hwopt doctor`, with its cause made."""

import os
import shutil
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

from hwopt import api
from hwopt.hardware import doctor
from hwopt.hardware.device import GIB
from hwopt.hardware.doctor import CheckResult, check_import, checks, examine
from hwopt.hardware.torch_build import Driver, NvidiaCard

T4 = Driver("580.65", (13, 0), (NvidiaCard("Tesla T4", (7, 5)),))
Usage = namedtuple("Usage", "total used free")


def with_driver(monkeypatch: pytest.MonkeyPatch, driver: Driver | None) -> None:
    monkeypatch.setattr(doctor, "nvidia_driver", lambda: driver)


def add_pci_device(folder: Path, vendor: str, kind: str) -> None:
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(f"{vendor}\n")
    (folder / "class").write_text(f"{kind}\n")


@pytest.mark.parametrize(
    ("vendor", "kind", "status"),
    [
        ("0x10de", "0x030000", "problem"),
        ("0x10de", "0x030200", "problem"),
        ("0x10de", "0x040300", "ok"),
        ("0x1002", "0x030000", "ok"),
    ],
    ids=["display", "compute card", "its sound device", "another vendor"],
)
def test_card_without_a_driver_is_a_problem(
    vendor: str, kind: str, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_driver(monkeypatch, None)
    add_pci_device(tmp_path / "0000:01:00.0", vendor, kind)
    found = doctor.check_driver(tmp_path)
    assert found.status == status
    assert ("ubuntu-drivers" in found.fix) == (status == "problem")


def test_driver_that_reports_no_card_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    with_driver(monkeypatch, Driver("580.65"))
    found = doctor.check_driver()
    assert (found.status, found.text) == ("problem", "an NVIDIA driver (580.65) is installed, but reports no card")
    assert "nvidia-smi" in found.fix


def test_torch_problem_is_split_into_text_and_command(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = "torch 2.13.0+cpu is built for CPUs: hwopt runs on the CPU. Install another build: pip install torch==2.13.0"
    monkeypatch.setattr(doctor, "torch_problem", lambda environment: problem)
    found = doctor.check_torch()
    assert (found.status, found.text) == ("problem", "torch 2.13.0+cpu is built for CPUs: hwopt runs on the CPU")
    assert found.fix == "Install another build: pip install torch==2.13.0"


@pytest.mark.parametrize(
    ("environment", "status", "text", "fix"),
    [
        ({"CUDA_VISIBLE_DEVICES": ""}, "warning", "CUDA_VISIBLE_DEVICES='' hides Tesla T4", "unset CUDA_VISIBLE_DEVICES"),
        ({}, "problem", "cannot use Tesla T4: CUDA error 999", "nvidia-smi"),
    ],
)
def test_card_that_torch_does_not_see(
    environment: dict[str, str], status: str, text: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error 999")

    with_driver(monkeypatch, T4)
    monkeypatch.setattr(doctor, "torch_problem", lambda environment: "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", fail)
    found = doctor.check_torch(environment)
    assert found.status == status
    assert text in found.text
    assert fix in found.fix


def test_gpu_of_a_mac_is_named_by_plan_and_doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(doctor, "nvidia_driver", lambda: None)
    assert "this Mac's GPU (MPS) is not used" in doctor.check_torch().text
    for profile in ("auto", "cpu"):
        notes = api.resolve(profile, cache=tmp_path).notes
        assert "this Mac's GPU (MPS) is not used: hwopt trains on its CPU" in notes


@pytest.mark.parametrize(
    ("code", "status", "text"),
    [
        ("pass", "ok", "imports"),
        ("import no_such_package", "problem", "it does not work: ModuleNotFoundError: No module named 'no_such_package'"),
        ("import sys; sys.exit('no native library')", "problem", "it does not work: no native library"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "problem", "the process ended with code -11"),
    ],
)
def test_import_of_a_package_is_tried_in_a_process(code: str, status: str, text: str) -> None:
    found = check_import("package", code, "it does not work", "reinstall it")
    assert found.status == status
    assert text in found.text
    assert found.fix == ("" if status == "ok" else "reinstall it")


def test_import_that_hangs_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "IMPORT_SECONDS", 0.01)
    assert "the import takes more than" in check_import("package", "import time; time.sleep(60)", "", "reinstall it").text


BROKEN = "raise ImportError('libcudart.so.12: cannot open shared object file')"
STAND_IN = "class ErrorHandlerMockBNBNativeLibrary: pass\nlib = ErrorHandlerMockBNBNativeLibrary()"


@pytest.mark.parametrize(
    ("name", "file", "source", "problem"),
    [
        ("bitsandbytes", "__init__.py", BROKEN, "libcudart.so.12"),
        ("bitsandbytes", "cextension.py", STAND_IN, "do not work: no native library"),
        ("deepspeed", "__init__.py", BROKEN, "libcudart.so.12"),
    ],
)
def test_broken_installation_is_a_problem_with_the_command(
    name: str, file: str, source: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").touch()
    (tmp_path / name / file).write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = getattr(doctor, f"check_{name}")()
    assert found.status == "problem"
    assert problem in found.text
    assert name in found.fix
    assert "pip install" in found.fix


def test_name_of_the_stand_in_library_is_that_of_bitsandbytes() -> None:
    from bitsandbytes import cextension

    assert [name for name in vars(cextension) if "Mock" in name] == ["ErrorHandlerMockBNBNativeLibrary"]


def test_missing_deepspeed_is_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    found = doctor.check_deepspeed()
    assert found.status == "ok"
    assert "hwopt[deepspeed]" in found.text


@pytest.mark.parametrize(("gib", "status"), [(1 / 16, "warning"), (8, "ok")])
def test_small_shared_memory_is_a_warning(gib: float, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(int(gib * GIB), 0, int(gib * GIB)))
    found = doctor.check_shared_memory(tmp_path)
    assert found.status == status
    assert ("--shm-size" in found.fix) == (status == "warning")


def stub_nvml(monkeypatch: pytest.MonkeyPatch, *processes: Any) -> None:
    for name, value in {
        "nvmlInit": None,
        "nvmlShutdown": None,
        "nvmlDeviceGetCount": 1,
        "nvmlDeviceGetHandleByIndex": "handle",
        "nvmlDeviceGetComputeRunningProcesses": list(processes),
    }.items():
        monkeypatch.setattr(pynvml, name, lambda *_, value=value: value)


def test_other_process_on_the_card_is_a_warning_with_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    own = SimpleNamespace(pid=os.getpid(), usedGpuMemory=9 * GIB)
    stub_nvml(monkeypatch, own, SimpleNamespace(pid=2**22 + 1, usedGpuMemory=5 * GIB), SimpleNamespace(pid=1, usedGpuMemory=None))
    found = doctor.check_other_processes()
    assert found.status == "warning"
    assert found.text.startswith(f"2 hold 5.0 GiB: process {2**22 + 1} (?) with 5.0 GiB on card 0, process 1 (")
    assert found.fix == f"if they are yours: kill 1 {2**22 + 1}"


def test_processes_are_not_listed_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    assert doctor.check_other_processes().status == "ok"


@pytest.mark.parametrize(("disk", "fix"), [("the cache", "HWOPT_CACHE"), ("models", "HF_HOME"), ("runs", "--output-dir")])
@pytest.mark.parametrize(("gib", "status"), [(1, "problem"), (10, "warning"), (100, "ok")])
def test_full_disk_is_named_with_the_setting(
    disk: str, fix: str, gib: int, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: asked.append(path) or Usage(0, 0, gib * GIB))
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "not" / "made"))
    monkeypatch.chdir(tmp_path)
    found = checks(tmp_path / "not" / "made")[f"disk of {disk}"]()
    assert found.status == status
    assert (fix in found.fix) == (status != "ok")
    assert asked == [tmp_path]


def test_folder_that_cannot_be_written_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert doctor.check_disk(tmp_path, "").text == f"{tmp_path} is not writable"


WSL2 = "Linux version 5.15.153.1-microsoft-standard-WSL2"


@pytest.mark.parametrize(
    ("kernel", "libraries", "folder", "status", "fix"),
    [
        ("Linux version 6.8.0-generic", False, "/mnt/c/me", "ok", ""),
        (WSL2, True, "/home/me", "ok", ""),
        (WSL2, True, "/mnt/c/me", "warning", "cd ~"),
        (WSL2, True, "/mnt/data", "ok", ""),
        (WSL2, False, "/home/me", "problem", "wsl --update"),
        ("Linux version 4.4.0-19041-Microsoft", True, "/home/me", "problem", "wsl --set-version DISTRIBUTION 2"),
    ],
)
def test_wsl(kernel: str, libraries: bool, folder: str, status: str, fix: str, tmp_path: Path) -> None:
    (tmp_path / "version").write_text(kernel)
    if libraries:
        (tmp_path / "lib").mkdir()
    found = doctor.check_wsl(tmp_path / "version", Path(folder), str(tmp_path / "lib"))
    assert found.status == status
    assert fix in found.fix
    assert bool(found.fix) == bool(fix)


@pytest.mark.parametrize(
    ("environment", "driver", "status", "fix"),
    [
        ({}, None, "ok", ""),
        ({"COLAB_RELEASE_TAG": "release-colab"}, None, "problem", "Change runtime type"),
        ({"COLAB_GPU": "1"}, T4, "ok", ""),
        ({"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}, None, "problem", "Accelerator"),
        ({"KAGGLE_KERNEL_RUN_TYPE": "Batch"}, T4, "ok", ""),
    ],
)
def test_notebook_service_without_its_gpu_is_a_problem(
    environment: dict[str, str], driver: Driver | None, status: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_driver(monkeypatch, driver)
    found = doctor.check_notebook_service(environment)
    assert found.status == status
    assert fix in found.fix
    assert bool(found.fix) == bool(fix)


def test_check_that_raises_is_a_warning_and_hides_no_other() -> None:
    def broken() -> CheckResult:
        raise RuntimeError("odd machine")

    found = examine({"broken thing": broken, "x": lambda: CheckResult("ok", "fine")})
    assert {check: each.status for check, each in found.items()} == {"broken thing": "warning", "x": "ok"}
    assert "RuntimeError: odd machine" in found["broken thing"].text


def test_every_check_answers_on_this_machine(tmp_path: Path) -> None:
    found = examine({name: check for name, check in checks(tmp_path).items() if name not in ("bitsandbytes", "deepspeed")})
    assert not [each for each in found.values() if "the check failed" in each.text]
    assert all(bool(each.fix) == (each.status != "ok") for each in found.values())
