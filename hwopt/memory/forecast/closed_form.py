"""Closed form tier: memory of weights, gradients, masters and optimizer state, from the bytes per parameter.

It is a lower bound: activations and temporaries are not included. Sharding follows Rajbhandari et al. 2020 (arXiv:1910.02054,
figure 1): stage 1 shards the optimizer state and masters over the ranks, stage 2 also the gradients, stage 3 (and FSDP) also the
weights. Offloaded parts are in the host's memory (Ren et al. 2021, arXiv:2101.06840). 4-bit weights follow Dettmers et al. 2023
(arXiv:2305.14314): half a byte each and a scale per 64 weights, which double quantization stores in one byte.
"""

from __future__ import annotations

from hwopt.plugin import MemorySpec

NF4_BYTES = 0.5 + 4 / 64
NF4_DOUBLE_QUANTIZED_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)


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


def sharded(
    parts: dict[str, float], stage: int, ranks: int, *, offload_optimizer: bool = False, offload_parameters: bool = False
) -> dict[str, float]:
    """Return the bytes by kind on each of `ranks` devices under ZeRO `stage` (0 to 3); 0 for offloaded kinds."""
    sharded_kinds = {1: ("optimizer_state", "masters"), 2: ("optimizer_state", "masters", "gradients"), 3: tuple(parts)}
    found = {kind: size / ranks if kind in sharded_kinds.get(stage, ()) else size for kind, size in parts.items()}
    if offload_optimizer and stage:
        found |= {"optimizer_state": 0.0, "masters": 0.0}
    if offload_parameters and stage == 3:
        found["weights"] = 0.0
    return found
