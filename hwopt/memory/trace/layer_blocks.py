"""What one traced step tells about its layers: where the block of each begins, what it owns, and what its block does.

hwopt.memory.trace.skipped_layers writes it down, hwopt.memory.trace.extended_trace builds the timeline of all layers from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

FORWARD, BACKWARD, OUTSIDE, OWN = "forward", "backward", "outside", "own"
Position = tuple[int, int, int]
"""A place in a trace: the number of events, of operations and of tensors moved to host memory before it."""


class NotRepeated(Exception):
    """The layers cannot be skipped. The message says why."""


@dataclass(frozen=True)
class TraceBlock:
    """A part of a trace: the events, the operations and the tensors moved to host memory, from one mark to the next."""

    events: range
    operations: range
    moved: range


@dataclass
class Marks:
    """What one traced step tells about its layers."""

    starts: list[tuple[str, int, Position]] = field(default_factory=list)
    """(pass, layer, where its block begins), in the order of the step. OUTSIDE: behind the last layer of the forward or the
    backward pass."""
    calls: dict[int, Any] = field(default_factory=dict)
    """Layer -> what it was called with."""
    owned: dict[int, list[int | None]] = field(default_factory=dict)
    """Layer -> the storages of its parameters, buffers, gradients and optimizer state before the first layer runs."""
    gradients: dict[int, list[int | None]] = field(default_factory=dict)
    """Layer -> the storages of its gradients after the backward pass."""
    filled: TraceBlock | None = None
    """Where the gradients of the skipped layers were allocated, after the backward pass."""


Step = tuple[int, str, int, int]
"""A use of a storage in a block, independent of the place of its layer: (+1 allocated or -1 released, pass, offset to the layer
that owns it, place there), or (sign, "", 0, number) for a storage that no layer owns."""


@dataclass(frozen=True)
class Template:
    """The block of a layer, independent of its place in the stack."""

    events: tuple[Step, ...]
    operands: tuple[tuple[Step, ...], ...]
    operations: range
    sizes: tuple[float, ...]
    """Sizes of the storages that the block allocates."""
    flops: tuple[float, ...]
    moved: tuple[float, ...]
    """Bytes of each tensor that the block moves to host memory."""
    first: int
    """Index of its first event in the trace."""

    @property
    def content(self) -> Any:
        """What is equal for two layers that do the same. The last layer that uses a common tensor also releases it."""
        return tuple(step for step in self.events if not releases_common(step)), self.operands, self.sizes, self.flops, self.moved

    def uses(self, storage: int) -> bool:
        """Whether an operation of the block uses a storage that no layer owns."""
        return any(which == "" and place == storage for used in self.operands for _, which, _, place in used)


def releases_common(step: Step) -> bool:
    """Whether a layer releases a tensor that no layer owns, such as an attention mask."""
    return step[0] < 0 and step[1] == ""


def block_between(one: Position, two: Position) -> TraceBlock:
    """The part of a trace from one place to another."""
    return TraceBlock(*(range(start, stop) for start, stop in zip(one, two, strict=True)))
