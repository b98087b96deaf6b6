"""What a device uses while a run trains: the peak of its memory, and its utilization by NVML."""

from __future__ import annotations

from typing import Any

import torch

from hwopt.hardware.device import GIB


def peak_memory_gib(device: torch.device) -> float:
    """The allocator's peak on a GPU, the process's resident peak on a CPU; GiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    try:
        import resource
    except ImportError:  # Windows
        import psutil

        return float(psutil.Process().memory_info().rss) / GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB


def gpu_utilization_reader(device: torch.device) -> Any:
    """A function that returns the GPU's utilization in percent, or None where nobody can tell."""
    if device.type != "cuda":
        return None
    import pynvml

    try:
        pynvml.nvmlInit()
        uuid = torch.cuda.get_device_properties(device).uuid
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        pynvml.nvmlDeviceGetUtilizationRates(handle)
    except pynvml.NVMLError:
        return None  # containers without the management library, MIG slices
    return lambda: float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
