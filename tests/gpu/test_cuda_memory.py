"""What a run finds free on the card does not depend on what the process did before."""

import gc

import pytest
import torch

from hwopt.hardware.cuda_memory import release_unused_memory
from hwopt.hardware.detect import detect
from hwopt.hardware.device import GIB

pytestmark = pytest.mark.device("any")


class Failed:
    """A tensor of a failed run, in a reference cycle as by its exception."""

    def __init__(self) -> None:
        self.weights = torch.empty(GIB, dtype=torch.uint8, device="cuda")
        self.itself = self


def test_detect_counts_the_memory_of_garbage_and_of_cached_blocks_as_free() -> None:
    before = detect().free_memory_gib
    gc.disable()
    try:
        Failed()
        cached = torch.empty(GIB, dtype=torch.uint8, device="cuda")
        del cached
        assert torch.cuda.memory_reserved() >= 2 * GIB
        assert detect().free_memory_gib == before
    finally:
        gc.enable()


def test_release_keeps_tensors_that_are_in_use() -> None:
    kept = torch.ones(1000, device="cuda")
    release_unused_memory()
    assert torch.cuda.memory_allocated() >= kept.numel() * kept.element_size()
