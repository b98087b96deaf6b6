"""Monitor a device during training: peak memory, and utilization through NVML."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hwopt.hardware.device import GIB


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory in GiB: of torch's allocator on a GPU, of the process (resident) on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    try:
        import resource
    except ImportError:  # Windows
        import psutil

        return float(psutil.Process().memory_info().rss) / GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB


def gpu_utilization_reader(device: torch.device) -> Callable[[], float] | None:
    """A function that returns the GPU's utilization in percent, or None if NVML cannot measure it."""
    if device.type != "cuda":
        return None
    import pynvml

    try:
        pynvml.nvmlInit()
        uuid = torch.cuda.get_device_properties(device).uuid
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        pynvml.nvmlDeviceGetUtilizationRates(handle)
    except pynvml.NVMLError:
        return None  # no management library in the container, or a MIG slice
    return lambda: float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
