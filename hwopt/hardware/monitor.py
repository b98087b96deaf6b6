"""Read a device during training: peak memory, what NVML reports of a GPU, and means of it that a thread samples."""

from __future__ import annotations

import resource
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from typing import Any

import psutil
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

    rates, memory = read("nvmlDeviceGetUtilizationRates"), read("nvmlDeviceGetMemoryInfo")
    milliwatts = read("nvmlDeviceGetPowerUsage")
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


PERIOD = 0.5
"""Seconds between two samples: NVML's utilization covers 1/6 to 1 s."""
AVERAGED = tuple(each.name for each in fields(GpuReading) if each.name != "slowdowns")


@dataclass
class Means:
    """Sums of samples, from which means are computed."""

    samples: int = 0
    throttled: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    """Name of a value -> number of samples that have it."""
    slowdowns: Counter[str] = field(default_factory=Counter)
    cpu_seconds: float = 0.0
    seconds: float = 0.0

    def add(self, reading: GpuReading | None, cpu_seconds: float, seconds: float) -> None:
        self.cpu_seconds += cpu_seconds
        self.seconds += seconds
        if reading is None:
            return
        found = {name: value for name in AVERAGED if (value := getattr(reading, name)) is not None}
        self.sums |= {name: self.sums.get(name, 0.0) + value for name, value in found.items()}
        self.counts.update(found.keys())
        self.slowdowns.update(reading.slowdowns)
        self.samples += 1
        self.throttled += bool(reading.slowdowns)

    def to_dict(self) -> dict[str, Any]:
        """Name with its unit -> mean; `throttled_share` and `throttle_reasons` are parts of the samples."""
        found: dict[str, Any] = {name: total / self.counts[name] for name, total in self.sums.items()}
        if self.samples:
            found["throttled_share"] = self.throttled / self.samples
        if self.slowdowns:
            found["throttle_reasons"] = {name: count / self.samples for name, count in self.slowdowns.items()}
        if self.seconds:
            found["cpu_percent"] = 100 * self.cpu_seconds / self.seconds
        return found


class Sampler:
    """Samples every PERIOD seconds inside the block of `running`. The other methods may be called from another thread."""

    def __init__(self, read: Callable[[], GpuReading] | None, workers: Callable[[], Iterable[int]]) -> None:
        """`read`: reads the GPU; None without one. `workers`: the process ids of the data workers."""
        self.read, self.workers = read, workers
        self.total, self.window = Means(), Means()
        self.lock, self.stop = threading.Lock(), threading.Event()
        self.processes: dict[int, psutil.Process] = {}
        self.cpu_before: dict[int, float] = {}
        self.sampled = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Sample in a thread until the end of the block."""
        self.stop.clear()
        self.sampled, self.cpu_before = time.perf_counter(), self.cpu_times()
        thread = threading.Thread(target=self.run, name="hwopt-sampler", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.stop.set()
            thread.join()

    def run(self) -> None:
        self.sample()
        while not self.stop.wait(PERIOD):
            self.sample()

    def sample(self) -> None:
        """Add a sample to the means."""
        reading = None if self.read is None else self.read()
        cpu, now = self.cpu_times(), time.perf_counter()
        used = sum(max(0.0, seconds - self.cpu_before.get(pid, seconds)) for pid, seconds in cpu.items())
        passed, self.sampled, self.cpu_before = now - self.sampled, now, cpu
        with self.lock:
            for means in (self.total, self.window):
                means.add(reading, used, passed)

    def take(self) -> dict[str, Any]:
        """The means since the last call."""
        with self.lock:
            means, self.window = self.window, Means()
        return means.to_dict()

    def cpu_times(self) -> dict[int, float]:
        """Process id -> CPU seconds so far, of this process and of its data workers."""
        found = {}
        for pid in (psutil.Process().pid, *self.workers()):
            with suppress(psutil.Error):
                process = self.processes.setdefault(pid, psutil.Process(pid))
                times = process.cpu_times()
                found[pid] = times.user + times.system
        return found
