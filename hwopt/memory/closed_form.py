"""Closed form: what weights, gradients, masters and the optimizer's state need, from bytes a parameter, in no time.

A lower bound: activations and temporaries are left out. Sharding after Rajbhandari et al. 2020 (arXiv:1910.02054, figure 1):
stage 1 spreads the optimizer's state and masters over the ranks, stage 2 the gradients too, stage 3 the weights too; FSDP is 3.
What is offloaded lies in the host's memory (Ren et al. 2021, arXiv:2101.06840). 4-bit weights after Dettmers et al. 2023
(arXiv:2305.14314): half a byte, a scale for each 64 of them, which double quantization stores in a byte.
"""

from __future__ import annotations

from hwopt.plugin import MemorySpec

NF4_BYTES = 0.5 + 4 / 64
NF4_DOUBLE_QUANTIZED_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)


def on_device(spec: MemorySpec) -> dict[str, float]:
    """Bytes by kind on one device, of what it holds of each."""
    return {kind: size * spec.held.get(kind, 1.0) for kind, size in states(spec).items()}


def states(spec: MemorySpec) -> dict[str, float]:
    """Bytes by kind on one device that holds everything."""
    return {
        "weights": spec.parameters * spec.weight_bytes,
        "gradients": spec.trained * spec.gradient_bytes,
        "optimizer_state": spec.trained * spec.state_bytes,
        "masters": spec.trained * spec.master_bytes,
    }


def sharded(
    parts: dict[str, float], stage: int, ranks: int, *, offload_optimizer: bool = False, offload_parameters: bool = False
) -> dict[str, float]:
    """`parts` of `states` on each of `ranks` devices under ZeRO `stage` (0 to 3); offloaded kinds are 0 on the device."""
    spread = {1: ("optimizer_state", "masters"), 2: ("optimizer_state", "masters", "gradients"), 3: tuple(parts)}
    found = {kind: size / ranks if kind in spread.get(stage, ()) else size for kind, size in parts.items()}
    if offload_optimizer and stage:
        found |= {"optimizer_state": 0.0, "masters": 0.0}
    if offload_parameters and stage == 3:
        found["weights"] = 0.0
    return found
