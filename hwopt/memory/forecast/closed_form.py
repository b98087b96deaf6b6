"""Closed form tier: memory of weights, gradients, masters and optimizer state, from the bytes per parameter.

It is a lower bound: activations and temporaries are not included. Sharding follows Rajbhandari et al. 2020 (arXiv:1910.02054,
figure 1): stage 1 shards the optimizer state and masters over the ranks, stage 2 also the gradients, stage 3 (and FSDP) also the
weights.
"""

from __future__ import annotations

from hwopt.plugin import MemorySpec


def on_device(spec: MemorySpec) -> dict[str, float]:
    """Return the bytes by kind on one device, for the fraction of each kind that it holds."""
    return {kind: size * spec.held.get(kind, 1.0) for kind, size in states(spec).items()}


def states(spec: MemorySpec) -> dict[str, float]:
    """Return the bytes by kind on one device that holds the whole model."""
    return {
        "weights": spec.weights,
        "gradients": spec.trained * spec.gradient_bytes,
        "optimizer_state": spec.trained * spec.state_bytes,
        "masters": spec.trained * spec.master_bytes,
    }


def sharded(parts: dict[str, float], stage: int, ranks: int) -> dict[str, float]:
    """Return the bytes by kind on each of `ranks` devices under ZeRO `stage` (0 to 3)."""
    sharded_kinds = {1: ("optimizer_state", "masters"), 2: ("optimizer_state", "masters", "gradients"), 3: tuple(parts)}
    return {kind: size / ranks if kind in sharded_kinds.get(stage, ()) else size for kind, size in parts.items()}
