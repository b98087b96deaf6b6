"""Skips equal layers while a step is traced. hwopt.memory.trace.extended_trace adds what they would have done to the timeline.

A layer that is run marks where its forward and its backward pass begin, and records what it was called with. A layer that is
skipped returns its input. After the backward pass the gradients of the skipped layers are allocated, which the update needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hwopt.memory.trace.extended_trace import Extension
from hwopt.memory.trace.layer_blocks import BACKWARD, FORWARD, OUTSIDE, Marks, NotRepeated, block_between
from hwopt.memory.trace.layer_kinds import FEWEST_LAYERS, contexts, layer_kinds, layers_to_run, repeated_layers
from hwopt.memory.trace.timeline import Timeline
from hwopt.memory.trace.tracker import MemoryTracker, TooManyOperations

FEWEST_OPERATIONS, OPERATIONS_PER_TOKEN = 800, 2
"""A forward pass of a layer with more operations, and more for each token, is a loop over the tokens: its trace takes minutes.

A layer of Mamba has 3 or 4 operations for each token. One with attention has about 100 for all tokens, one with a gated delta
rule has 400, and 12 for each 64 tokens."""


class SequentialScan(Exception):
    """A layer computes token after token, which takes too long to trace. The message says with how many operations."""


class SkippedLayers:
    """The layers of a model that a trace skips. `extended` adds them to the timeline of a step."""

    def __init__(self, model: nn.Module, optimizer: Any, tracker: MemoryTracker, *, whole: bool) -> None:
        """Skip layers of `model` from now on, unless the trace is to run the `whole` model."""
        self.optimizer, self.tracker = optimizer, tracker
        layers = [] if whole else repeated_layers(model)
        self.layers = layers if len(layers) >= FEWEST_LAYERS else []
        kinds = layer_kinds(self.layers)
        self.contexts, self.run = contexts(kinds), layers_to_run(kinds)
        first = {self.contexts[number]: number for number in reversed(self.run)}
        self.model_of = {number: number if number in self.run else first[context] for number, context in enumerate(self.contexts)}
        """Layer -> the layer whose block it repeats; a layer that is run repeats itself."""
        self.marks = Marks()
        self.returns_tuple = False
        for number, layer in enumerate(self.layers) if self else ():
            instance: Any = layer
            if number in self.run:
                instance.forward = partial(self.run_layer, number, layer.forward)
                continue
            instance.forward = partial(self.skip, number)
            if getattr(layer, "gradient_checkpointing", False):  # its input would be moved to host memory
                instance.gradient_checkpointing = False

    def __bool__(self) -> bool:
        """Whether there are layers to skip."""
        return len(self.run) < len(self.layers)

    def storages_of(self, layer: nn.Module) -> list[int | None]:
        """Return the numbers of the storages that belong to `layer`, in a fixed order; None for one that does not exist."""
        parameters = list(layer.parameters())
        tensors: list[Any] = [*parameters, *layer.buffers(), *(parameter.grad for parameter in parameters)]
        for parameter in parameters:
            tensors += [value for value in self.optimizer.state.get(parameter, {}).values() if isinstance(value, Tensor)]
        return [None if tensor is None else self.tracker.number_of(tensor) for tensor in tensors]

    def run_layer(self, number: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The forward of a layer that is run."""
        if not self.marks.starts:  # gradients of earlier micro-batches exist now
            self.marks.owned = {number: self.storages_of(layer) for number, layer in enumerate(self.layers)}
            hidden = first_input(args, kwargs)
            if hidden.requires_grad:
                hidden.register_hook(lambda _: self.mark(OUTSIDE, -1))
        self.mark(FORWARD, number)
        output = self.computed(forward, args, kwargs)
        if number == self.run[-1]:
            self.mark(OUTSIDE, -1)
        self.returns_tuple = isinstance(output, tuple)
        if self.returns_tuple and len(output) > 1:
            raise NotRepeated("a layer returns several values")
        hidden = output[0] if self.returns_tuple else output
        self.marks.calls[number] = self.describe_call(args, kwargs), describe_tensor(hidden)
        if hidden.requires_grad:
            hidden.register_hook(lambda _: self.mark(BACKWARD, number))
        return output

    def computed(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return the output of the layer `forward`. Raises SequentialScan if it runs too many operations for its tokens."""
        tokens = first_input(args, kwargs).shape[1]
        most = max(FEWEST_OPERATIONS, OPERATIONS_PER_TOKEN * tokens)
        self.tracker.allowed = len(self.tracker.ends) + most
        try:
            return forward(*args, **kwargs)
        except TooManyOperations:
            message = f"a layer runs more than {most:,} operations for {tokens:,} tokens: it computes them one after the other"
            raise SequentialScan(message) from None
        finally:
            self.tracker.allowed = math.inf

    def skip(self, number: int, *args: Any, **kwargs: Any) -> Any:
        """The forward of a layer that is skipped: returns its input."""
        hidden = first_input(args, kwargs)
        self.marks.calls[number] = self.describe_call(args, kwargs), describe_tensor(hidden)
        return (hidden,) if self.returns_tuple else hidden

    def describe_call(self, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Return what the layer was called with: of its first input the shape, of other tensors also the storage."""
        hidden = first_input(args, kwargs)
        named = [(key, value) for key, value in kwargs.items() if value is not hidden]
        return describe_tensor(hidden), self.describe([value for value in args if value is not hidden]), self.describe(named)

    def describe(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return describe_tensor(value), self.tracker.number_of(value)
        if isinstance(value, (tuple, list)):
            return tuple(map(self.describe, value))
        plain = value is None or isinstance(value, (bool, int, float, str, torch.dtype))
        return value if plain else (type(value), id(value))

    def mark(self, which: str, number: int) -> None:
        self.marks.starts.append((which, number, self.tracker.position()))

    def after_backward(self) -> None:
        """Allocate the gradients of the skipped layers, which the update needs."""
        started = self.tracker.position()
        for number, source in self.model_of.items():
            pairs = zip(self.layers[number].parameters(), self.layers[source].parameters(), strict=True)
            for parameter, like in pairs if number != source else ():
                if like.grad is not None and parameter.grad is None:
                    parameter.grad = torch.zeros_like(like.grad)
                    self.tracker.label([parameter.grad], "gradients")
        for number, layer in enumerate(self.layers):
            grads = [parameter.grad for parameter in layer.parameters()]
            self.marks.gradients[number] = [None if grad is None else self.tracker.number_of(grad) for grad in grads]
        self.marks.filled = block_between(started, self.tracker.position())

    def extended(self, timeline: Timeline) -> Timeline:
        """Return the timeline of a step in which every layer runs. Raises NotRepeated if it cannot be told."""
        if set(self.marks.calls) != set(self.model_of):
            raise NotRepeated("a layer was not called")
        for number, source in self.model_of.items():
            if self.marks.calls[number] != self.marks.calls[source]:
                raise NotRepeated(f"layers {source} and {number} get other arguments")
        return Extension(self.run, self.model_of, self.contexts, self.marks, timeline).timeline()


def first_input(args: Any, kwargs: Mapping[str, Any]) -> Tensor:
    found: Tensor = args[0] if args else kwargs["hidden_states"]
    return found


def describe_tensor(tensor: Tensor) -> Any:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad
