"""MemorySpec: bytes of weights, gradients and optimizer state that plugins change before the memory planner traces a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class MemorySpec:
    """The memory planner's estimate of a plan, before a trace. Plugins change it in `memory`."""

    parameters: int
    trained: int
    """Number of parameters that get gradients."""
    frozen_bytes: float = 4.0
    """Bytes per unpacked parameter without a gradient. The next four are bytes per trained parameter."""
    weight_bytes: float = 4.0
    gradient_bytes: float = 4.0
    state_bytes: float = 8.0
    master_bytes: float = 0.0
    packed: int = 0
    """Number of parameters that a plugin stores in a format of its own, in `packed_bytes` bytes together."""
    packed_bytes: float = 0.0
    unpacked: Mapping[str, int] = field(default_factory=dict)
    """Weights that the plugin cannot pack: name -> number of parameters. The plan shows their bytes."""
    held: dict[str, float] = field(default_factory=dict)
    """Kind of memory ("weights", "gradients", "optimizer_state", "update") -> fraction of it on this device, if below 1.

    "update" is temporary memory of the optimizer update.
    """
    buffers: float = 0.0
    """Additional bytes on the device, which a trace of the stand-ins does not show."""
    pooled_tokens: int | None = None
    """Micro-batches of up to so many tokens (0: all) compute their passes in a memory pool of their own, which they keep."""
    late_state: bool = False
    """Whether the first update creates the optimizer's state: it finds the blocks that the passes have left."""
    host: float = 0.0
    """Bytes of this rank in host memory."""
    stand_ins: dict[str, Any] = field(default_factory=dict)
    """Recipe slot -> a callable that replaces the slot's own in a trace, and allocates the same memory on fake tensors.

    The stand-in of an engine may have `earlier_gradients()`, which allocates the gradients after a first micro-batch, and
    `buffers`, the tensors in which it keeps and sends gradients.
    """

    @property
    def weights(self) -> float:
        """Bytes of all weights, packed and unpacked."""
        frozen = max(self.parameters - self.trained - self.packed, 0)
        return frozen * self.frozen_bytes + self.trained * self.weight_bytes + self.packed_bytes
