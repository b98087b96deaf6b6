"""Data parallelism: reduction of absent gradients, and buckets."""

from pathlib import Path

import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from hwopt.distributed.data_parallel import DataParallelEngine, make_buckets


def test_reduce_handles_absent_and_mixed_gradients(tmp_path: Path) -> None:
    """With one rank a reduction changes no value: absent gradients stay absent, or become zeros if another rank has them."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    try:
        sizes = [(3, torch.float32), (5, torch.float16), (7, torch.float32), (40, torch.float32), (2, torch.float32)]
        parameters = [torch.nn.Parameter(torch.zeros(size, dtype=dtype)) for size, dtype in sizes]
        for parameter in parameters[:4]:
            parameter.grad = torch.randn(len(parameter)).to(parameter.dtype)
        expected = [None if p.grad is None else p.grad.clone() for p in parameters]
        engine = DataParallelEngine.__new__(DataParallelEngine)
        engine.trained, engine.buckets = parameters, list(make_buckets(parameters, 64))
        engine.has_gradient = torch.tensor([1, 1, 1, 1, 0])
        engine.reduce()
        for parameter, value in zip(parameters, expected, strict=True):
            assert (parameter.grad is None) == (value is None)
            assert value is None or torch.equal(parameter.grad, value)
        engine.has_gradient[4] = 1  # another rank has this gradient
        engine.reduce()
        assert torch.equal(parameters[4].grad, torch.zeros(2))
    finally:
        dist.destroy_process_group()


@given(st.lists(st.tuples(st.integers(1, 50), st.booleans()), max_size=20), st.integers(4, 200))
def test_buckets_hold_every_tensor_once_in_order(sizes: list[tuple[int, bool]], most: int) -> None:
    tensors = [torch.empty(size, dtype=torch.float32 if full else torch.float16) for size, full in sizes]
    buckets = list(make_buckets(tensors, most))
    assert [id(tensor) for bucket in buckets for tensor in bucket] == [id(tensor) for tensor in tensors]
    for bucket in buckets:
        assert len({tensor.dtype for tensor in bucket}) == 1
        assert len(bucket) == 1 or sum(tensor.numel() * tensor.element_size() for tensor in bucket) <= most
