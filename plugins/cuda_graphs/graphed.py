"""Forward and backward pass of a micro-batch as one CUDA graph for each shape."""

from __future__ import annotations

import os
import random
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hwopt.distributed.forward_backward import ForwardBackward
from hwopt.errors import PluginError
from hwopt.plugin import RunView

Key = tuple[Any, ...]
TORCH = os.path.dirname(torch.__file__)
"""Lines of torch do not tell users which line of the model cannot be captured."""


@dataclass(frozen=True)
class Graph:
    """A captured forward and backward pass, and the tensors that a replay reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    loss: Tensor
    gradients: list[Tensor]
    """The gradients that a replay makes, one for each trained tensor; empty if it adds to those of earlier micro-batches."""


class GraphedForwardBackward(ForwardBackward):
    """Runs the first micro-batch eagerly, captures each other shape when it first comes, and replays its graph from then on.

    All graphs use one memory pool: nothing in it outlives a replay except the gradients, which the update reads before the next.
    Eager passes do not use it: what they create for later, such as a table of positions, would be overwritten by the next replay.
    So a shape that ran eagerly first would need its memory twice.
    In a step of several micro-batches the gradients are added up outside of the pool, because eager passes add to them too.
    While a profiler records, each shape is captured again: a replay would show it no operators.
    """

    def __init__(self, run: RunView, passes: ForwardBackward, most: int, tokens: int) -> None:
        """`passes`: the loop's. `most`: how many graphs are kept. `tokens`: micro-batches with more run eagerly; 0: no limit."""
        super().__init__(run)
        self.passes = passes
        self.most, self.tokens = most, tokens
        self.weights = list(run.inner_model.parameters())
        self.places: list[int] = []
        """The addresses of the trained weights, which the graphs read."""
        self.trained: list[Tensor] = []
        """The weights that an eager pass gave a gradient."""
        self.sums: list[Tensor] = []
        """Their gradients in steps of several micro-batches: the same memory in each step. Empty until a graph needs them."""
        self.stream = torch.cuda.Stream()
        self.graphs: dict[Key, Graph] = {}
        self.seen = Counter[Key]()
        self.failed = Counter[Key]()
        self.refused: dict[Key, str] = {}
        """Shapes whose capture failed twice -> why. Once may be a kernel that is compiled or tuned for the shape."""
        self.calls = Counter[str]()
        """How the micro-batches of the present step were computed: "captured", "replayed", "eager", "too large" for a graph."""
        self.alone = True
        self.out_of_memory = 0

    def __call__(self, micro_batch: Any, first: bool, last: bool, mark_time: Callable[[str], None]) -> Tensor:
        if first:
            self.begin_step(alone=last)
        tensors = self.passes.tensors(micro_batch)
        inputs = list(tensors.values())
        key = (self.alone, self.passes.constants(), *tensors, *((tensor.shape, tensor.dtype) for tensor in inputs))
        self.seen[key] += 1
        large = bool(self.tokens) and inputs[0].shape[:2].numel() > self.tokens
        graph = None if large else self.graph_of(key, tensors)
        if graph is None:
            self.calls["too large" if large else "eager"] += 1
            loss = self.passes(micro_batch, first, last, mark_time)
            if not self.graphs:
                self.trained = with_gradient(self.weights)
            return loss
        torch._foreach_copy_(graph.inputs, inputs)
        self.passes.set_weight(micro_batch)
        graph.graph.replay()
        if self.alone:
            for weight, gradient in zip(self.trained, graph.gradients, strict=True):
                weight.grad = gradient
        self.calls["replayed"] += 1
        mark_time("forward")
        return graph.loss

    def begin_step(self, alone: bool) -> None:
        """Prepare the gradients of a step; `alone`: it has one micro-batch."""
        self.alone, self.calls = alone, Counter()
        places = [weight.data_ptr() if weight.requires_grad else 0 for weight in self.weights]
        if places != self.places:  # another plugin moved weights, or trains others from now on
            self.forget()
            self.places, self.trained, self.out_of_memory = places, [], 0
        if not alone and self.sums:
            torch._foreach_zero_(self.sums)
            for weight, total in zip(self.trained, self.sums, strict=True):
                weight.grad = total

    def graph_of(self, key: Key, tensors: dict[str, Tensor]) -> Graph | None:
        """The graph of a shape, captured if need be; None if it is to run eagerly."""
        recorded = torch._C._autograd._profiler_enabled()
        if key in self.graphs and not recorded:
            return self.graphs[key]
        if not self.trained or key in self.refused or self.out_of_memory > 1:
            return None
        self.graphs.pop(key, None)
        if len(self.graphs) >= self.most and not self.forget_a_rarer_one(key):
            return None
        return self.capture(key, tensors)

    def forget_a_rarer_one(self, key: Key) -> bool:
        """Drop the graph of the shape that came least often, if that of `key` came twice as often. Returns whether it did."""
        rarest = min(self.graphs, key=self.seen.__getitem__)
        if self.seen[key] < 2 * self.seen[rarest]:
            return False
        del self.graphs[rarest]
        return True

    def capture(self, key: Key, tensors: dict[str, Tensor]) -> Graph | None:
        """Capture both passes of a shape; nothing is computed. None, with one warning, if its operators cannot be captured."""
        if not self.alone and not self.sums:
            self.sums = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in self.trained]
            for weight, total in zip(self.trained, self.sums, strict=True):
                weight.grad = total
        if not self.graphs:
            self.pool = torch.cuda.graph_pool_handle()  # a pool ends with its last graph
        own = {name: tensor.clone() for name, tensor in tensors.items()}
        graph = torch.cuda.CUDAGraph()
        host_state, python_state = torch.get_rng_state(), random.getstate()
        try:
            with self.capturing(graph):
                loss = self.passes.compute(own)
            if python_state != random.getstate() or not torch.equal(host_state, torch.get_rng_state()):
                raise RuntimeError("it draws random numbers on the host, such as LayerDrop, and a graph repeats what it drew")
            if list(map(id, with_gradient(self.weights))) != list(map(id, self.trained)):
                raise RuntimeError("it gives gradients to other weights than the first step did")
            gradients = [without_ownership(weight.grad) for weight in self.trained] if self.alone else []
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, PluginError) as error:
            if not isinstance(without_guard(error), RuntimeError):
                raise
            torch.set_rng_state(host_state)
            random.setstate(python_state)
            self.failed[key] += 1
            if self.failed[key] > 1:
                self.refuse(key, without_guard(error))
            if not self.graphs:
                self.sums = []
            return None
        finally:
            if self.alone:
                for weight in self.weights:
                    weight.grad = None  # its memory belongs to the pool, which the next capture uses again
        self.calls["captured"] += 1
        self.graphs[key] = found = Graph(graph, list(own.values()), loss, gradients)
        return found

    @contextmanager
    def capturing(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Capture the operators of the block. Raises what the block raises, or what CUDA says of them at the end."""
        before = torch.cuda.current_stream()
        error: BaseException | None = None
        capture = torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local")
        capture.__enter__()
        try:
            yield
        except BaseException as raised:  # raised again below: the end of the capture may raise another
            error = raised
        try:
            capture.__exit__(None, None, None)
        except RuntimeError as raised:
            error = error or raised
            leave_failed_capture(self.pool, before)
            self.forget()  # the other graphs use the random state that the capture spoiled
        try:
            if error is not None:
                raise error
        finally:
            error = None  # else it and this frame, in its traceback, would keep each other, and with them what was captured

    def refuse(self, key: Key, error: BaseException) -> None:
        """Run this shape eagerly from now on. Warns the first time."""
        frames = traceback.extract_tb(error.__traceback__)
        where = [frame for frame in frames if not frame.filename.startswith(TORCH)][-1]
        self.refused[key] = f"{str(error).splitlines()[0]} ({where.filename}:{where.lineno}: {where.line})"
        if len(self.refused) == 1:
            self.run.warn(f"A step cannot be captured in a CUDA graph, continuing without one: {self.refused[key]}")

    def free(self) -> bool:
        """Free all graphs. No more are captured after the second time that memory ran out, or if it did without a graph.

        Then it is short, and the update, which cannot be repeated, would miss the memory that a pool keeps.
        """
        found = self.forget()
        self.out_of_memory += 1 if found else 2
        if found and self.out_of_memory > 1:
            self.run.warn("The device has no memory for CUDA graphs, continuing without them")
        return found

    def forget(self) -> bool:
        """Drop all graphs and the gradients that they add up. Returns whether there was a graph."""
        found = bool(self.graphs)
        self.graphs.clear()
        self.sums = []
        return found


def leave_failed_capture(pool: Any, before: torch.cuda.Stream) -> None:
    """Put back what torch leaves in the state of a capture if it cannot end one (pytorch#171263)."""
    torch.cuda.set_stream(before)
    device = torch.cuda.current_device()
    with suppress(RuntimeError):  # newer versions of torch have ended it
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)
    generator = torch.cuda.default_generators[device]
    generator.graphsafe_set_state(generator.clone_state())


def without_guard(error: BaseException) -> BaseException:
    """What a plugin's function raised, if `error` is hwopt's error that names the plugin."""
    return (error.__cause__ or error) if isinstance(error, PluginError) else error


def with_gradient(weights: Sequence[Tensor]) -> list[Tensor]:
    return [weight for weight in weights if weight.grad is not None]


def without_ownership(tensor: Any) -> Tensor:
    """A tensor on the memory of `tensor` that does not keep it allocated."""
    whole: Any = tensor.untyped_storage()
    storage = torch._C._construct_storage_from_data_pointer(whole.data_ptr(), tensor.device, whole.nbytes())
    empty = torch.empty((), dtype=tensor.dtype, device=tensor.device)
    return empty.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
