"""What one traced step tells about its layers: where the block of each begins, and what it owns.

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


def block_between(one: Position, two: Position) -> TraceBlock:
    """The part of a trace from one place to another."""
    return TraceBlock(*(range(start, stop) for start, stop in zip(one, two, strict=True)))
