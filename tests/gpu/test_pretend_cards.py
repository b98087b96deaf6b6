"""What the other tests rely on: pretend cards count, limit memory and fail as real ones do."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pretend_cuda.counters import counting

pytestmark = pytest.mark.device("pretend")


def test_read_of_the_device_counts_as_one_wait() -> None:
    value = torch.ones((), device="cuda") + 1
    with counting(stacks=True) as counts:
        assert value.item() == 2
    assert counts.waits == 1
    assert any("test_read_of_the_device" in stack for stack in counts.stacks)


def test_launches_and_products_are_counted_and_do_not_wait() -> None:
    left = torch.ones(8, 8, device="cuda")
    with counting() as counts:
        right = left @ left
        right.add_(1)
    assert (counts["gemm"], counts["launch"], counts.waits) == (1, 2, 0)
    assert right.sum().item() == 8 * 8 * 9


def test_allocation_over_the_cards_memory_fails() -> None:
    free, total = torch.cuda.mem_get_info()
    cached = torch.cuda.memory_reserved()  # released before an allocation fails
    with pytest.raises(torch.OutOfMemoryError, match=f"total capacity of {total / 2**30:.2f} GiB"):
        torch.empty(free + cached + 2**21, dtype=torch.uint8, device="cuda")


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
def test_wait_in_a_graph_capture_fails() -> None:
    value = torch.ones((), device="cuda")
    refused = pytest.raises(torch.AcceleratorError, match="not permitted when stream is capturing")
    with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        value.item()


def test_sort_runs_on_a_card_without_kernels_of_its_own() -> None:
    """torch has kernels for compute capability 8.6, not for an L4's 8.9; the gradient of a large embedding is sorted."""
    step = "torch.nn.Embedding(10, 4, device='cuda')(torch.zeros(8192, dtype=torch.long, device='cuda')).sum().backward()"
    on_l4 = [sys.executable, str(Path(__file__).parents[1] / "pretend_cuda"), "l4"]
    # at a usual exit directly after a backward pass, the thread of torch's autograd may abort Python 3.11
    code = f"import os, torch; {step}; os._exit(0)"
    done = subprocess.run([*on_l4, sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
