"""Counters of the pretend CUDA driver: launches, matrix products, copies, and the waits of the host for the device.

Works only in a process that runs on a pretend card:

    with counting(stacks=True) as counts:
        step()
    counts["wait.stream"], counts.kernels, counts.stacks
"""

import ctypes
import json
import os
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

WAIT = ctypes.CFUNCTYPE(None, ctypes.c_char_p)


def on_pretend_card() -> bool:
    """Whether this process runs on a pretend card."""
    return "PRETEND_GPU" in os.environ


@cache
def library() -> ctypes.CDLL:
    """The library that counts. Raises OSError in a process without pretend cards."""
    found = ctypes.CDLL("libpretend.so")
    found.pretend_report.restype = ctypes.c_char_p
    return found


def report() -> dict[str, Any]:
    """All counters since the process started, the launches of each kernel, and the memory of each card."""
    found: dict[str, Any] = json.loads(library().pretend_report())
    return found


class Counts(Counter[str]):
    """The counters of a block; a counter that did not change is 0."""

    kernels: Counter[str]
    """Kernel -> launches."""
    stacks: Counter[str]
    """Kind of wait and Python stack -> occurrences."""

    @property
    def waits(self) -> int:
        """How often the host waited for the device.

        A read such as `.item()` counts once: its copy to the host is followed by a synchronization of the stream.
        """
        kinds = ("stream", "device", "event", "copy_to_device", "free")
        only_copies = max(0, self["wait.copy_to_host"] - self["wait.stream"])
        return only_copies + sum(self[f"wait.{kind}"] for kind in kinds)


@contextmanager
def counting(stacks: bool = False) -> Iterator[Counts]:
    """Count what happens inside the block; with `stacks`, keep the Python stack of every wait."""
    counts, seen = Counts(), Counter[str]()

    def waited(kind: bytes) -> None:
        frames = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_stack()[:-1]]
        seen["\n  ".join((kind.decode(), *frames[-12:]))] += 1

    before, callback = report(), WAIT(waited)
    if stacks:
        library().pretend_on_wait(callback)
    try:
        yield counts
    finally:
        if stacks:
            library().pretend_on_wait(WAIT())
        after = report()
        counts.update(Counter(after["counters"]) - Counter(before["counters"]))
        counts.kernels = Counter(after["kernels"]) - Counter(before["kernels"])
        counts.stacks = seen


@contextmanager
def computing_all() -> Iterator[None]:
    """A block in which the card computes the values of operators of any size, as with PRETEND_COMPUTE=all."""
    compute = ctypes.CDLL("libpretend_torch.so").pretend_compute
    compute.argtypes, compute.restype = [ctypes.c_int64], ctypes.c_int64
    before = compute(-1)
    try:
        yield
    finally:
        compute(before)
