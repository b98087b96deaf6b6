"""Check a machine for what stops a fine-tuning or slows it: driver, torch, libraries, shared memory, other processes, disks.

A check is a function that returns a CheckResult: what is fine, or a warning or a problem with its fix. To add one, write the
function and add it to `checks`. Its inputs are parameters with the machine's values as defaults, so that a test can make the
cause.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from hwopt.hardware.detect import has_apple_gpu
from hwopt.hardware.device import GIB
from hwopt.hardware.torch_build import WSL_FOLDER, nvidia_driver, torch_problem
from hwopt.text import cut, first_line, listing

Status = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class CheckResult:
    """The answer of a check."""

    status: Status
    text: str
    fix: str = ""
    """The command or the setting that fixes it; empty if `status` is ok."""


PCI = Path("/sys/bus/pci/devices")
NVIDIA_VENDOR, DISPLAY_CLASS = "0x10de", "0x03"
LEAST_SHARED_GIB = 1.0
"""Docker gives a container 1/16 GiB. A worker's batch of long texts has megabytes, and several batches are prefetched."""
LOW_DISK_GIB, LEAST_DISK_GIB = 20.0, 2.0
"""A checkpoint of a 110 M model with its optimizer state has 1.3 GB, and the weights of a 7 B model 15 GB."""
IMPORT_SECONDS = 300

IMPORT_BITSANDBYTES = """
import sys, warnings
warnings.simplefilter("ignore")
import bitsandbytes.cextension
sys.exit("no native library" if "Mock" in type(bitsandbytes.cextension.lib).__name__ else 0)
"""
IMPORT_DEEPSPEED = """
import logging, sys
logging.disable(logging.WARNING)
from deepspeed.ops.op_builder import CPUAdamBuilder
sys.exit(0 if CPUAdamBuilder().is_compatible(verbose=False) else "the operation CPUAdam cannot be compiled")
"""


def check_driver(pci: Path = PCI) -> CheckResult:
    """The NVIDIA driver: loaded, and its version."""
    driver = nvidia_driver()
    if driver is None:
        if not has_nvidia_card(pci):
            return CheckResult("ok", "no NVIDIA card; hwopt trains on the CPU")
        text = "this machine has an NVIDIA card, but no NVIDIA driver"
        return CheckResult("problem", text, "sudo ubuntu-drivers install, then reboot")
    if not driver.cards:
        fix = "nvidia-smi shows the error; reboot after an update of the driver; start a container with --gpus all"
        return CheckResult("problem", f"{driver.text} is installed, but reports no card", fix)
    cuda = "" if driver.cuda is None else f", for CUDA up to {driver.cuda[0]}.{driver.cuda[1]}"
    return CheckResult("ok", f"NVIDIA {driver.version}{cuda}: {listing(driver.names)}")


def has_nvidia_card(pci: Path = PCI) -> bool:
    """Whether a PCI device is a display controller of NVIDIA."""

    vendors = (file for file in pci.glob("*/vendor") if file.read_text(encoding="ascii").startswith(NVIDIA_VENDOR))
    return any((file.parent / "class").read_text(encoding="ascii").startswith(DISPLAY_CLASS) for file in vendors)


def check_torch(environment: Mapping[str, str] = os.environ) -> CheckResult:
    """The torch build against the card and the driver."""
    import torch

    if fault := torch_problem(environment=environment):
        text, _, fix = fault.rpartition(". ")
        return CheckResult("problem", text, fix)
    release = f"torch {torch.__version__}"
    if torch.cuda.is_available():
        return CheckResult("ok", f"{release} for CUDA {torch.version.cuda}, {torch.cuda.device_count()} device(s)")
    if (driver := nvidia_driver()) is None or not driver.cards:
        return CheckResult("ok", f"{release}, on the CPU" + ("; this Mac's GPU (MPS) is not used" if has_apple_gpu() else ""))
    visible = environment.get("CUDA_VISIBLE_DEVICES", "0")
    if visible.strip() in ("", "-1"):
        text = f"CUDA_VISIBLE_DEVICES={visible!r} hides {listing(driver.names)}"
        return CheckResult("warning", text, "unset CUDA_VISIBLE_DEVICES")
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        text = f"{release} cannot use {listing(driver.names)}: {first_line(error)}"
    else:
        text = f"{release} finds no device, although the driver reports {listing(driver.names)}"
    return CheckResult("problem", text, "nvidia-smi shows the driver's error; a reboot reloads the driver")


def check_bitsandbytes() -> CheckResult:
    """bitsandbytes imports, with its native library."""
    fix = "python -m bitsandbytes shows the reason; pip install --upgrade --force-reinstall --no-deps bitsandbytes"
    return check_import("bitsandbytes", IMPORT_BITSANDBYTES, "8-bit optimizers and quantization do not work", fix)


def check_deepspeed() -> CheckResult:
    """DeepSpeed imports, and can compile the optimizer for offloading. It is optional."""
    if importlib.util.find_spec("deepspeed") is None:
        return CheckResult("ok", "not installed; only ZeRO needs it (pip install 'hwopt[deepspeed]')")
    fix = "pip install --upgrade deepspeed; ds_report shows what is missing; its operations need g++ and CUDA's nvcc (CUDA_HOME)"
    return check_import("deepspeed", IMPORT_DEEPSPEED, "ZeRO does not work", fix)


def check_import(package: str, code: str, effect: str, fix: str) -> CheckResult:
    """Run `code`, which imports `package`, in a process of its own: a broken library can crash the process."""
    command = [sys.executable, "-c", code]
    try:
        found = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", timeout=IMPORT_SECONDS)
    except subprocess.TimeoutExpired:
        return CheckResult("problem", f"the import takes more than {IMPORT_SECONDS} s", fix)
    if found.returncode == 0:
        return CheckResult("ok", "imports, and finds its native code")
    lines = [line for line in found.stderr.splitlines() if line.strip()]
    why = cut(lines[-1], 200) if found.returncode > 0 and lines else f"the process ended with code {found.returncode}"
    return CheckResult("problem", f"{effect}: {why}", fix)


def check_shared_memory(folder: Path = Path("/dev/shm")) -> CheckResult:
    """/dev/shm, in which data-loading workers hand over their batches."""
    if not folder.is_dir():
        return CheckResult("ok", f"this system has no {folder}")
    size = shutil.disk_usage(folder).total / GIB
    if size >= LEAST_SHARED_GIB:
        return CheckResult("ok", f"{folder} has {size:.1f} GiB")
    text = f"{folder} has {size:.2f} GiB; data-loading workers can die with a bus error"
    fix = "docker run --shm-size=8g, or --ipc=host; on a host: sudo mount -o remount,size=8G /dev/shm"
    return CheckResult("warning", text, fix)


def check_other_processes() -> CheckResult:
    """Processes that hold memory of a card."""
    import pynvml

    held: list[str] = []
    total = 0
    try:
        pynvml.nvmlInit()
        try:
            for index in range(pynvml.nvmlDeviceGetCount()):
                for process in pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex(index)):
                    if process.pid != os.getpid():
                        used = process.usedGpuMemory or 0  # None in a container and on Windows
                        total += used
                        memory = f" with {used / GIB:.1f} GiB" if used else ""
                        held.append(f"process {process.pid} ({process_name(process.pid)}){memory} on card {index}")
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        return CheckResult("ok", f"cannot be listed without NVIDIA's driver ({first_line(error)})")
    if not held:
        return CheckResult("ok", "no other process computes on a card")
    pids = " ".join(sorted({entry.split()[1] for entry in held}, key=int))
    memory = f" hold {total / GIB:.1f} GiB" if total else " compute here"
    return CheckResult("warning", f"{len(held)}{memory}: {listing(held, 5)}", f"if they are yours: kill {pids}")


def process_name(pid: int) -> str:
    """The name of a process; "?" if it belongs to another container."""
    import psutil

    try:
        return str(psutil.Process(pid).name())
    except psutil.Error:
        return "?"


def check_disk(folder: Path, fix: str) -> CheckResult:
    """The free space of the disk on which `folder` is, or would be. `fix`: how to choose another folder."""
    existing = next(place for place in (folder, *folder.parents) if place.is_dir())
    free = shutil.disk_usage(existing).free / GIB
    text = f"{free:.1f} GiB are free for {folder}"
    if not os.access(existing, os.W_OK):
        return CheckResult("problem", f"{existing} is not writable", fix)
    status: Status = "problem" if free < LEAST_DISK_GIB else "warning" if free < LOW_DISK_GIB else "ok"
    return CheckResult(status, text, "" if status == "ok" else fix)


def check_wsl(
    kernel: Path = Path("/proc/version"), working_folder: Path | None = None, libraries: str = WSL_FOLDER
) -> CheckResult:
    """Windows Subsystem for Linux: version 2, with NVIDIA's libraries, and not on a Windows disk."""
    release = kernel.read_text(encoding="utf-8", errors="replace").lower()
    if "microsoft" not in release:
        return CheckResult("ok", f"not used; this is {platform.system()}")
    if "wsl2" not in release and "microsoft-standard" not in release:
        return CheckResult("problem", "WSL 1 has no GPU", "in PowerShell: wsl --set-version DISTRIBUTION 2")
    if not Path(libraries).is_dir():
        text = f"{libraries} does not exist, so Linux cannot use the card"
        return CheckResult(
            "problem", text, "install NVIDIA's driver in Windows, then in PowerShell: wsl --update; wsl --shutdown"
        )
    folder = (working_folder or Path.cwd()).absolute()
    if re.match(r"/mnt/[a-z](/|$)", str(folder)):
        text = f"{folder} is on a Windows disk, which Linux reads and writes slowly"
        return CheckResult("warning", text, "work in the Linux file system: cd ~")
    return CheckResult("ok", "WSL 2 with NVIDIA's libraries")


def check_notebook_service(environment: Mapping[str, str] = os.environ) -> CheckResult:
    """Colab and Kaggle: the runtime has its GPU."""
    colab = any(name in environment for name in ("COLAB_RELEASE_TAG", "COLAB_GPU"))
    if not colab and "KAGGLE_KERNEL_RUN_TYPE" not in environment:
        return CheckResult("ok", "neither Colab nor Kaggle")
    service = "Colab" if colab else "Kaggle"
    if nvidia_driver() is not None:
        return CheckResult("ok", f"{service} with a GPU")
    fix = "Runtime > Change runtime type > T4 GPU" if colab else "Settings > Accelerator > GPU T4 x2"
    return CheckResult("problem", f"this {service} runtime has no GPU", f"in the notebook's menu: {fix}")


def checks(cache: Path) -> dict[str, Callable[[], CheckResult]]:
    """Name -> check, in the order of the report: a cause comes before what it causes. `cache`: hwopt's cache folder."""
    from huggingface_hub.constants import HF_HOME

    return {
        "driver": check_driver,
        "torch": check_torch,
        "notebook service": check_notebook_service,
        "WSL": check_wsl,
        "other processes": check_other_processes,
        "bitsandbytes": check_bitsandbytes,
        "deepspeed": check_deepspeed,
        "shared memory": check_shared_memory,
        "disk of the cache": partial(check_disk, cache, "export HWOPT_CACHE=FOLDER, on a larger disk"),
        "disk of models": partial(check_disk, Path(HF_HOME), "hf cache prune, or export HF_HOME=FOLDER, on a larger disk"),
        "disk of runs": partial(check_disk, Path("runs").absolute(), "hwopt run --output-dir FOLDER, on a larger disk"),
    }


def examine(checks: Mapping[str, Callable[[], CheckResult]]) -> dict[str, CheckResult]:
    """Name -> finding of all `checks`, which run at the same time: some of them import a library, which takes seconds."""
    with ThreadPoolExecutor() as pool:
        return dict(zip(checks, pool.map(found_by, checks.values()), strict=True))


def found_by(check: Callable[[], CheckResult]) -> CheckResult:
    """What `check` finds. A check that raises is a warning: one odd machine must not hide the other answers."""
    try:
        return check()
    except Exception as error:
        text = f"the check failed: {type(error).__name__}: {first_line(error)}"
        return CheckResult("warning", text, "report it with the output of hwopt doctor --report")
