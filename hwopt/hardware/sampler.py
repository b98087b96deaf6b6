"""Sampler: reads the GPU and the CPU time of the process and its workers in the background, for means over a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from typing import Any

import psutil

from hwopt.hardware.monitor import GpuReading

PERIOD = 0.5
"""Seconds between two samples: NVML's utilization covers 1/6 to 1 s."""
AVERAGED = tuple(each.name for each in fields(GpuReading) if each.name != "slowdowns")


@dataclass
class Means:
    """Sums of samples, from which means are computed."""

    samples: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    """Name of a value, or of a slowdown -> number of samples that have it."""
    cpu_seconds: float = 0.0
    seconds: float = 0.0

    def add(self, reading: GpuReading | None, cpu_seconds: float, seconds: float) -> None:
        self.cpu_seconds += cpu_seconds
        self.seconds += seconds
        if reading is None:
            return
        self.samples += 1
        for name in AVERAGED:
            if (value := getattr(reading, name)) is not None:
                self.sums[name] = self.sums.get(name, 0.0) + value
                self.counts[name] = self.counts.get(name, 0) + 1
        for slowdown in reading.slowdowns:
            self.counts[slowdown] = self.counts.get(slowdown, 0) + 1
        if reading.slowdowns:
            self.counts["throttled"] = self.counts.get("throttled", 0) + 1

    def to_dict(self) -> dict[str, Any]:
        """Name with its unit -> mean; `throttled_share` and `throttle_reasons` are parts of the samples."""
        found: dict[str, Any] = {name: total / self.counts[name] for name, total in self.sums.items()}
        if self.samples:
            found["throttled_share"] = self.counts.get("throttled", 0) / self.samples
            reasons = {name: count / self.samples for name, count in self.counts.items() if name not in (*AVERAGED, "throttled")}
            found |= {"throttle_reasons": reasons} if reasons else {}
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
        while True:
            self.sample()
            if self.stop.wait(PERIOD):
                return

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
