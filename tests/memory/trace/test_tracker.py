import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hwopt.memory.trace.tracker import ELEMENTWISE, PLAIN, MemoryTracker

aten = torch.ops.aten


def described(value):
    same = value.untyped_storage()._cdata
    return value.shape, value.stride(), value.storage_offset(), value.dtype, value.device, value.requires_grad, same


def results(mode):
    """Each operator of the tracker's short ways, on arguments of several layouts: what it returns, and whether it is a view."""
    with mode:
        x = torch.empty(4, 6)
        half, turned, column, wide = x.bfloat16(), torch.empty(6, 4).t(), torch.empty(4, 1), torch.empty(4, 6, dtype=torch.int64)
        calls = {
            aten.detach.default: [(x,), (turned,)],
            aten.view.default: [(x, [2, 12]), (half, [24])],
            aten._unsafe_view.default: [(x, [2, 12])],
            aten.t.default: [(x,)],
            aten.permute.default: [(x, [1, 0])],
            aten.expand.default: [(column, [4, 6])],
            aten.unsqueeze.default: [(turned, 0)],
            aten.mm.default: [(x, x.t()), (half, half.t())],
            aten._to_copy.default: [(x,), (turned,), (column.expand(4, 6),)],
            aten.zero_.default: [(x,)],
            aten.transpose.int: [(x, 0, 1)],
            aten.slice.Tensor: [(x, 1, 2, 5), (turned, 0, 1, 3)],
            aten.fill_.Scalar: [(half, 2.0)],
        }
        pairs = [
            (x, x),
            (x, 2.0),
            (half, 3),
            (x, half),
            (turned, turned),
            (x, turned),
            (x, column),
            (wide, wide),
            (wide, 2.0),
            (x, 1j),
        ]
        calls |= {operator: [*pairs, (x, torch.tensor(2.0)), (x, x.sum())] for operator in ELEMENTWISE}
        assert set(calls) == PLAIN | ELEMENTWISE
        found = []
        for operator, given in calls.items():
            for arguments in given:
                *layout, storage = described(operator(*arguments))
                found.append((str(operator), *layout, storage == described(arguments[0])[-1]))
        found.append(tuple(described(aten._to_copy.default(x, dtype=torch.float16, memory_format=torch.preserve_format))[:-1]))
        return found


def test_frequent_operators_return_what_fake_tensors_return():
    assert results(MemoryTracker()) == results(FakeTensorMode())


@pytest.mark.parametrize("shape", [(2, 3), (4, 6)])
def test_operators_that_do_not_fit_are_refused(shape):
    with MemoryTracker(), pytest.raises(RuntimeError):
        torch.empty(4, 6) @ torch.empty(shape)
