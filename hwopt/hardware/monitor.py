"""Read a device during training: peak memory, and what NVML reports of a GPU."""

from __future__ import annotations

import resource
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from hwopt.hardware.device import GIB

SLOWDOWNS = {0x08: "hardware slowdown", 0x20: "thermal (software)", 0x40: "thermal (hardware)", 0x80: "power brake"}
"""NVML's reasons for low clocks that something outside of the run causes. The power cap is none: a busy GPU often reaches it."""


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory in GiB: of torch's allocator on a GPU, of the process (resident) on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB


@dataclass(frozen=True)
class GpuReading:
    """What NVML reports at one moment; None for what this GPU or its driver does not report."""

    gpu_percent: float | None = None
    """Part of the last moments (1/6 to 1 s) in which a kernel ran."""
    memory_busy_percent: float | None = None
    """Part of the last moments in which the memory was read or written."""
    memory_gib: float | None = None
    """Memory in use on the device, by all processes."""
    power_watts: float | None = None
    temperature_celsius: float | None = None
    clock_mhz: float | None = None
    """Clock of the streaming multiprocessors."""
    slowdowns: frozenset[str] = frozenset()
    """Names of the SLOWDOWNS that are active."""


def gpu_reader(device: torch.device) -> Callable[[], GpuReading] | None:
    """A function that reads the GPU `device`, or None for another device or without NVML (a container, a MIG slice)."""
    if device.type != "cuda":
        return None
    import pynvml

    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        pynvml.nvmlDeviceGetUtilizationRates(handle)
    except pynvml.NVMLError:
        return None
    return lambda: read_gpu(pynvml, handle)


def read_gpu(nvml: Any, handle: Any) -> GpuReading:
    """What `nvml`, the module pynvml, reports of the GPU `handle`."""

    def read(function: str, *arguments: Any) -> Any:
        with suppress(nvml.NVMLError, AttributeError):
            return getattr(nvml, function)(handle, *arguments)

    rates, memory, milliwatts = (
        read("nvmlDeviceGetUtilizationRates"),
        read("nvmlDeviceGetMemoryInfo"),
        read("nvmlDeviceGetPowerUsage"),
    )
    reasons = read("nvmlDeviceGetCurrentClocksEventReasons")
    if reasons is None:  # the name before driver 535
        reasons = read("nvmlDeviceGetCurrentClocksThrottleReasons")
    return GpuReading(
        gpu_percent=None if rates is None else float(rates.gpu),
        memory_busy_percent=None if rates is None else float(rates.memory),
        memory_gib=None if memory is None else memory.used / GIB,
        power_watts=None if milliwatts is None else milliwatts / 1000,
        temperature_celsius=read("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        clock_mhz=read("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
        slowdowns=frozenset(name for bit, name in SLOWDOWNS.items() if (reasons or 0) & bit),
    )
