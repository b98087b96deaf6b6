"""Formulas for the states that a rank holds, and for the bytes that ranks send each other in an optimizer step.

The states are a lower bound of the memory: activations and temporaries are not included. Sharding follows Rajbhandari et al. 2020
(arXiv:1910.02054, figure 1): stage 1 shards the optimizer state and masters over the ranks, stage 2 also the gradients, stage 3
(and FSDP) also the weights.

All collectives run in a ring of P ranks. In a reduce-scatter or an all-gather of S bytes each rank sends and receives
S (P - 1) / P. An all-reduce is both in turn, 2 S (P - 1) / P, which is optimal (Patarasuk and Yuan 2009, Bandwidth optimal
all-reduce algorithms for clusters of workstations). The ranks of a node are neighbours in the ring: one link enters a node and
one leaves it, and each carries as many bytes as any other link.
The volumes follow Rajbhandari et al. 2020 (arXiv:1910.02054, section 7) for ZeRO and Zhao et al. 2023 (arXiv:2304.11277) for FSDP
and its hybrid. Not included: single numbers (votes, norms), evaluation, and saving.
"""

from __future__ import annotations

from dataclasses import dataclass

from hwopt.errors import InputError
from hwopt.plugin import MemorySpec


@dataclass(frozen=True)
class Ranks:
    """A number of ranks, the same on every node. Raises InputError if the nodes do not divide it."""

    number: int
    nodes: int = 1

    def __post_init__(self) -> None:
        if self.number % self.nodes:
            count = f"{self.number} ranks" if self.number > 1 else "one rank"
            others = f", or a number of nodes that divides {self.number}" if self.number > 1 else ""
            raise InputError(
                f"--nodes {self.nodes}: {count} cannot be spread evenly over {self.nodes} nodes. "
                f"Give a multiple of {self.nodes} as --world-size{others}"
            )

    @property
    def per_node(self) -> int:
        return self.number // self.nodes


@dataclass(frozen=True)
class Scheme:
    """A way to shard a model over ranks."""

    name: str
    stage: int
    """What is sharded, as ZeRO stage: 0 nothing, 1 optimizer state and masters, 2 also gradients, 3 also weights."""
    in_node: bool = False
    """Sharded over the ranks of a node and replicated on every node."""

    def spread_over(self, ranks: Ranks) -> int:
        """Return the number of ranks that together hold one copy of the sharded parts."""
        if self.stage == 0:
            return 1
        return ranks.per_node if self.in_node else ranks.number


DATA_PARALLEL = Scheme("data parallel", 0)
HYBRID = Scheme("FSDP hybrid", 3, in_node=True)
SCHEMES = (DATA_PARALLEL, *(Scheme(f"ZeRO-{stage}", stage) for stage in (1, 2, 3)), Scheme("FSDP", 3), HYBRID)


def schemes_for(ranks: Ranks) -> tuple[Scheme, ...]:
    """Return the schemes that differ: a hybrid needs several nodes with several ranks each."""
    return SCHEMES if ranks.nodes > 1 and ranks.per_node > 1 else tuple(scheme for scheme in SCHEMES if not scheme.in_node)


@dataclass(frozen=True)
class Volume:
    """Bytes that a rank sends in an optimizer step, averaged over the ranks of a node. It receives as many."""

    within: float
    """Bytes sent to ranks of the same node."""
    between: float
    """Bytes sent to ranks of another node."""

    @property
    def sent(self) -> float:
        return self.within + self.between


def volume(scheme: Scheme, spec: MemorySpec, ranks: Ranks, micro_batches: int = 1) -> Volume:
    """Return what a rank sends in an optimizer step of `micro_batches` forward and backward passes.

    Gradients of trained parameters are sent in `gradient_bytes` each, weights in `weight_bytes`.
    """
    weights = spec.weights
    updated = spec.trained * spec.weight_bytes
    gradients = spec.trained * spec.gradient_bytes
    # all weights for the forward and again for the backward pass; gradients are reduced at once, since no rank keeps all of them
    sharded_weights = micro_batches * (2 * weights + gradients)
    if scheme.in_node:
        local, nodes = ranks.per_node, ranks.nodes
        # each rank all-reduces its shard with the ranks that hold the same shard on the other nodes
        return Volume(
            bytes_sent_in_ring(sharded_weights, local), 2 * bytes_sent_in_ring(micro_batches * gradients / local, nodes)
        )
    ring_bytes = {
        0: 2 * gradients,  # reduced once per step
        1: gradients + updated,  # reduced once per step, then the updated weights are gathered
        2: micro_batches * gradients + updated,
        3: sharded_weights,
    }
    return split_by_node(bytes_sent_in_ring(ring_bytes[scheme.stage], ranks.number), ranks)


def bytes_sent_in_ring(size: float, ranks: int) -> float:
    """Return the bytes that each rank sends in a reduce-scatter or an all-gather of `size` bytes."""
    return size * (ranks - 1) / ranks


def split_by_node(sent: float, ranks: Ranks) -> Volume:
    """Split the `sent` bytes of each rank in a ring over all ranks. Only the last rank of a node sends to the next node."""
    between = sent / ranks.per_node if ranks.nodes > 1 else 0.0
    return Volume(sent - between, between)


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
