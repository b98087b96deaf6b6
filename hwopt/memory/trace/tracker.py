"""MemoryTracker: a fake tensor mode that records every storage allocated and freed, and the work of every operation.

It sees the operations below autograd. A tensor that autograd saves for the backward pass stays alive and so is counted. Memory
that a kernel allocates internally is not seen; hwopt.memory.trace.cuda_emulation adds the known cases.
Source: torch.distributed._tools.mem_tracker does the same with module hooks and its own mode, and takes ten times as long.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from hwopt.memory.trace.timeline import KINDS, ColumnSum, Timeline, workspace_bytes
from hwopt.model.forward_cost import flops_of

ADD = torch.ops.aten.add.Tensor
LOCAL_SCALAR = torch.ops.aten._local_scalar_dense.default
DEVICE = torch.ops.prim.device.default

Workspace = Callable[..., "ColumnSum | int | list[int]"]
"""Takes the arguments of an operator and returns what its kernel allocates and frees (`MemoryTracker.add_workspaces`)."""


class TooManyOperations(Exception):
    """A part of the step runs more operations than `MemoryTracker.allowed`."""


class MemoryTracker(FakeTensorMode):
    """Records one timeline; `reset` starts a new one."""

    def __init__(
        self, workspaces: Mapping[Any, Workspace] | None = None, granularity: int = 1, processors: tuple[int, int] = (0, 0)
    ) -> None:
        """`workspaces`: by operator. `processors`: multiprocessors of the card, and threads of each."""
        super().__init__(allow_non_fake_inputs=True)
        self.workspaces = workspaces or {}
        self.granularity, self.processors = granularity, processors
        self.kind = "weights"
        self.zeros: list[Tensor] = []
        self.events: list[int] = []
        self.sizes: list[int] = []
        self.kinds: list[int] = []
        self.operands: list[int] = []
        self.ends: list[int] = []
        self.flops: list[float] = []
        self.dtypes: list[str] = []
        self.host_sizes: list[int] = []
        self.column_sums: dict[int, ColumnSum] = {}
        self.update = self.before = 0
        self.phases = [0, 0, 0]
        self.expandable = False
        self.late_state = False
        self.allowed: float = math.inf
        """The number of operations since `reset` at which TooManyOperations is raised."""
        self.counts_of_sum: tuple[int, ...] = (-1,)
        """`counts_of_sum()`; by default no sum is counted as one in place."""
        self._inside = False
        self._numbers: dict[int, int] = {}  # address of a live storage -> its number
        self._alive: dict[int, Any] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and disabling dynamo for each operation is slow

    def __deepcopy__(self, memo: Any) -> MemoryTracker:
        return self  # a copied tensor would belong to a copied mode, and each view of it would take memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        if func is LOCAL_SCALAR and isinstance(args[0], FakeTensor):
            return self.read_value(args[0])
        if self._inside:  # operations inside a fake implementation are not counted
            return self.dispatch(func, types, args, kwargs)
        in_place = func is ADD and isinstance(args[0], FakeTensor) and reference_counts(args[0]) == self.counts_of_sum
        self._inside = True
        try:
            out = self.dispatch(func, types, args, kwargs)
        finally:
            self._inside = False
        before = len(self.sizes)
        found = [value for value in tree_leaves(out) if isinstance(value, Tensor)]
        if in_place:
            self._reuse(args[0], out)
        self.add(found)
        if (inside := self.workspaces.get(func)) is not None:
            self.add_workspaces(inside(*args, **kwargs))
        if len(self.sizes) > before or in_place or func._schema.is_mutable:  # not a view
            self._record(func, args, kwargs, out, found)
        return out

    def read_value(self, tensor: Tensor) -> float | bool:
        """Return the value of a fake tensor that the code reads: 1 for a float, False otherwise, and 0 for those in `zeros`."""
        if any(tensor is zero or tensor._base is zero for zero in self.zeros):
            return 0.0
        return 1.0 if tensor.dtype.is_floating_point else False

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Count the new storages of `tensors` as `self.kind`. Tensors on the meta device stand for tensors in host memory."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if isinstance(tensor, FakeTensor) and tensor.fake_device.type == "meta":
                self.host_sizes.append(storage.nbytes())
                continue
            key = storage._cdata
            if key not in self._numbers:
                number = self._new(storage.nbytes())
                self._numbers[key] = number
                self._alive[number] = weakref.ref(storage, partial(self._freed, key, number))

    def number_of(self, tensor: Tensor) -> int | None:
        """Return the number of the storage of `tensor`; None if it is not counted."""
        return self._numbers.get(tensor.untyped_storage()._cdata)

    def add_workspaces(self, found: ColumnSum | int | list[int]) -> None:
        """Record workspaces, for a sum of columns or of so many bytes, that are allocated one after the other and then freed.

        A negative number frees the last one of that size sooner.
        """
        live: list[int] = []
        for each in found if isinstance(found, list) else [found]:
            if isinstance(each, ColumnSum):
                self.column_sums[len(self.sizes)] = each
                each = int(workspace_bytes(*each, *self.processors))
            if each < 0:
                freed = next(number for number in reversed(live) if self.sizes[number] == -each)
                live.remove(freed)
                self.events.append(-freed - 1)
            else:
                live.append(self._new(each))
                self.kinds[-1] = KINDS.index("temporary")
        self.events += [-number - 1 for number in reversed(live)]

    def label(self, tensors: Iterable[Tensor | None], kind: str) -> None:
        """Set the kind of the storages of `tensors`, from their allocation on."""
        for tensor in tensors:
            if tensor is not None:
                self.add([tensor])
                self.kinds[self._numbers[tensor.untyped_storage()._cdata]] = KINDS.index(kind)

    @contextmanager
    def new_storages_are(self, kind: str) -> Iterator[None]:
        """Set the kind of storages that are allocated inside the block."""
        previous, self.kind = self.kind, kind
        try:
            yield
        finally:
            self.kind = previous

    def reset(self) -> None:
        """Start a new timeline that begins with the storages that are alive."""
        alive = sorted(self._alive)
        renumbered = {number: place for place, number in enumerate(alive)}
        self.sizes = [self.sizes[number] for number in alive]
        self.kinds = [self.kinds[number] for number in alive]
        self.events = [place + 1 for place in range(len(alive))]
        self._numbers = {key: renumbered[number] for key, number in self._numbers.items()}
        storages = {number: reference() for number, reference in self._alive.items()}
        keys = {number: key for key, number in self._numbers.items()}
        self._alive = {
            renumbered[number]: weakref.ref(storage, partial(self._freed, keys[renumbered[number]], renumbered[number]))
            for number, storage in storages.items()
        }
        self.operands, self.ends, self.flops, self.dtypes, self.host_sizes = [], [], [], [], []
        self.column_sums = {}
        self.before = len(alive)

    def position(self) -> tuple[int, int, int]:
        """Return the number of events, of operations and of tensors moved to host memory since `reset`."""
        return len(self.events), len(self.ends), len(self.host_sizes)

    def begin_update(self) -> None:
        """Count the following operations as the optimizer's update."""
        self.update = len(self.ends)
        self.phases[1] = len(self.events)

    def begin_forward(self) -> None:
        """Count the following events as the forward pass."""
        self.phases[2] = len(self.events)

    def begin_backward(self) -> None:
        """Count the following events as the backward pass."""
        self.phases[0] = len(self.events)

    def timeline(self) -> Timeline:
        """Return what was recorded since `reset`."""
        return Timeline(
            np.array(self.events, np.int64),
            np.array(self.sizes, np.float64),
            np.array(self.kinds, np.int64),
            np.array(self.operands, np.int64),
            np.array(self.ends, np.int64),
            np.array(self.flops, np.float64),
            np.array(self.dtypes, np.str_),
            self.update,
            torch.backends.cuda.matmul.fp32_precision == "tf32",
            self.granularity,
            np.array(self.phases, np.int64),
            self.before,
            self.granularity > 1,
            self.expandable,
            np.array(self.host_sizes, np.float64),
            np.array([self.column_sums.get(number, (0, 0)) for number in range(len(self.sizes))], np.float64).reshape(-1, 2),
            np.array(self.processors, np.int64),
            self.late_state,
        )

    def _new(self, size: int) -> int:
        number = len(self.sizes)
        self.sizes.append(size)
        self.kinds.append(KINDS.index(self.kind))
        self.events.append(number + 1)
        return number

    def _reuse(self, old: Tensor, out: Any) -> None:
        """Count the storage of `out` as the one of `old`: nothing else uses that."""
        number = self._numbers.pop(old.untyped_storage()._cdata, None)
        if number is not None:
            storage = out.untyped_storage()
            self._numbers[storage._cdata] = number
            self._alive[number] = weakref.ref(storage, partial(self._freed, storage._cdata, number))

    def _freed(self, key: int, number: int, _: Any) -> None:
        if self._alive.pop(number, None) is not None:
            self._numbers.pop(key, None)
            self.events.append(-number - 1)

    def _record(self, func: Any, args: Any, kwargs: Any, out: Any, made: list[Tensor]) -> None:
        read = [value for value in tree_leaves((args, kwargs)) if isinstance(value, FakeTensor)]
        used = {self._numbers.get(tensor.untyped_storage()._cdata) for tensor in (*read, *made)}
        self.operands += sorted(number for number in used if number is not None)
        self.ends.append(len(self.operands))
        if len(self.ends) > self.allowed:
            raise TooManyOperations
        self.flops.append(float(flops_of(func._overloadpacket, args, kwargs, out)))
        self.dtypes.append(str(read[0].dtype).removeprefix("torch.") if read else "float32")


def reference_counts(tensor: Tensor) -> tuple[int, ...]:
    """The references to `tensor` in C++, to its storage, and in Python; () where torch does not tell."""
    if not hasattr(tensor, "_use_count"):
        return ()
    storage = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return tensor._use_count(), storage, sys.getrefcount(tensor)


def counts_of_sum() -> tuple[int, ...]:
    """The `reference_counts` of a gradient that only autograd holds, at the moment when it adds another gradient to it.

    Autograd then adds in place, but not while a dispatch mode is on, as here. Arguments on their way to the mode are counted too,
    so the counts are measured, on a sum of two gradients. They are not kept: Python holds one reference more to the arguments of
    a call while torch.compile's frame evaluation is installed.
    """
    seen: list[tuple[int, ...]] = [()]

    class Probe(FakeTensorMode):
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False  # as in MemoryTracker: the wrapper that skips it takes the frame evaluation away

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is ADD:
                seen.append(reference_counts(args[0]))
            return super().__torch_dispatch__(func, types, args, kwargs)

    with _disable_current_modes(), Probe(), torch.enable_grad():
        leaf = torch.zeros(2, requires_grad=True)
        twice = leaf * 2
        torch.cat([twice * 3, twice * 4]).sum().backward()
    return seen[-1] or (-1,)
