"""Means of NVML's readings and of CPU time, and what a driver that reports less leaves out."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from hwopt.hardware.monitor import GpuReading, Sampler, read_gpu


class NVMLError(Exception):
    pass


def nvml(**missing: Any) -> Any:
    """The module pynvml with one hot GPU; a value of None removes the function."""

    def refuse(*_: Any) -> Any:
        raise NVMLError

    functions: dict[str, Any] = {
        "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=80, memory=30),
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(used=2**31),
        "nvmlDeviceGetPowerUsage": lambda handle: 150_000,
        "nvmlDeviceGetTemperature": lambda handle, sensor: 91,
        "nvmlDeviceGetClockInfo": lambda handle, clock: 900,
        "nvmlDeviceGetCurrentClocksEventReasons": lambda handle: 0x44,  # the power cap and a thermal slowdown
    }
    functions |= {name: refuse if value is None else value for name, value in missing.items()}
    return SimpleNamespace(NVMLError=NVMLError, NVML_TEMPERATURE_GPU=0, NVML_CLOCK_SM=1, **functions)


def test_a_reading_has_units_and_the_reasons_that_slow_the_gpu_down() -> None:
    assert read_gpu(nvml(), None) == GpuReading(80.0, 30.0, 2.0, 150.0, 91, 900, frozenset({"thermal (hardware)"}))


def test_what_a_driver_does_not_report_is_none() -> None:
    silent = dict.fromkeys(("nvmlDeviceGetPowerUsage", "nvmlDeviceGetCurrentClocksEventReasons"))
    found = read_gpu(nvml(**silent), None)
    assert (found.power_watts, found.slowdowns) == (None, frozenset())
    older = {"nvmlDeviceGetCurrentClocksEventReasons": None, "nvmlDeviceGetCurrentClocksThrottleReasons": lambda handle: 0x80}
    assert read_gpu(nvml(**older), None).slowdowns == {"power brake"}


def test_means_are_those_of_the_samples_since_the_last_call_and_of_the_run() -> None:
    readings = iter([GpuReading(10.0), GpuReading(30.0), GpuReading(90.0, slowdowns=frozenset({"power brake"}))])
    sampler = Sampler(lambda: next(readings), list)
    sampler.sample()
    sampler.sample()
    first = sampler.take()
    assert (first["gpu_percent"], first["throttled_share"]) == (20.0, 0.0)
    assert "power_watts" not in first, "the driver did not report it"
    sampler.sample()
    second = sampler.take()
    assert (second["gpu_percent"], second["throttled_share"], second["throttle_reasons"]) == (90.0, 1.0, {"power brake": 1.0})
    whole = sampler.total.to_dict()
    assert whole["gpu_percent"] == pytest.approx(130 / 3)
    assert whole["throttled_share"] == pytest.approx(1 / 3)
    assert sampler.take() == {}, "no sample since"


def test_cpu_use_counts_this_process_and_ignores_workers_that_ended() -> None:
    sampler = Sampler(None, lambda: [2**22 + 1])  # no such process
    with sampler.running():
        started = time.process_time()
        while time.process_time() < started + 0.1:  # the system counts in hundredths of a second
            sum(range(1000))
        sampler.sample()
    assert sampler.total.to_dict()["cpu_percent"] > 0


def test_the_thread_ends_with_the_block_also_after_an_error() -> None:
    sampler = Sampler(None, list)
    with pytest.raises(RuntimeError, match="in the run"), sampler.running():
        raise RuntimeError("in the run")
    assert not any(thread.name == "hwopt-sampler" for thread in threading.enumerate())
