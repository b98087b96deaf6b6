"""Communication: the bytes that ranks send each other in an optimizer step, from formulas, in no time.

Everything goes round a ring of P ranks. In a reduce-scatter or an all-gather of S bytes each rank sends S (P - 1) / P and
receives as much; an all-reduce is one after the other, 2 S (P - 1) / P, and no algorithm needs less (Patarasuk and Yuan 2009,
Bandwidth optimal all-reduce algorithms for clusters of workstations). A node's ranks stand side by side in the ring: one link
enters a node, one leaves it, and as much goes over those as over any other.
What is sent: Rajbhandari et al. 2020 (arXiv:1910.02054, section 7) for ZeRO, Zhao et al. 2023 (arXiv:2304.11277) for FSDP and its
hybrid. Left out: what is a few numbers (votes, norms), evaluation, and saving.
"""

from __future__ import annotations

from dataclasses import dataclass

from hwopt.errors import InputError
from hwopt.plugin import MemorySpec


@dataclass(frozen=True)
class Ranks:
    """Ranks, the same number on every node. Raises InputError where that cannot be."""

    number: int
    nodes: int = 1

    def __post_init__(self) -> None:
        if self.number % self.nodes:
            count = f"{self.number} ranks" if self.number > 1 else "one rank"
            others = f", or a number of nodes that divides {self.number}" if self.number > 1 else ""
            raise InputError(
                f"--nodes {self.nodes}: {count} cannot be spread evenly over {self.nodes} nodes; "
                f"give a multiple of {self.nodes} as --world-size{others}"
            )

    @property
    def per_node(self) -> int:
        return self.number // self.nodes


@dataclass(frozen=True)
class Scheme:
    """A way to spread a model over ranks."""

    name: str
    stage: int
    """The ZeRO stage that it is in what it spreads: 0 nothing, 1 optimizer state and masters, 2 gradients too, 3 weights too."""
    in_node: bool = False
    """Spread over the ranks of a node, and the same on every node."""

    def spread_over(self, ranks: Ranks) -> int:
        """Ranks that have one of everything between them."""
        if self.stage == 0:
            return 1
        return ranks.per_node if self.in_node else ranks.number


DATA_PARALLEL = Scheme("data parallel", 0)
HYBRID = Scheme("FSDP hybrid", 3, in_node=True)
SCHEMES = (DATA_PARALLEL, *(Scheme(f"ZeRO-{stage}", stage) for stage in (1, 2, 3)), Scheme("FSDP", 3), HYBRID)


def schemes_for(ranks: Ranks) -> tuple[Scheme, ...]:
    """Those that differ: a hybrid is one only on several nodes of several ranks."""
    return SCHEMES if ranks.nodes > 1 and ranks.per_node > 1 else tuple(scheme for scheme in SCHEMES if not scheme.in_node)


@dataclass(frozen=True)
class Volume:
    """Bytes that a rank sends in an optimizer step, in the mean over the ranks of a node; it receives as many."""

    within: float
    """To ranks of its own node."""
    between: float
    """To ranks of another node."""

    @property
    def sent(self) -> float:
        return self.within + self.between


def volume(scheme: Scheme, spec: MemorySpec, ranks: Ranks, micro_batches: int = 1) -> Volume:
    """What `scheme` sends in an optimizer step of `micro_batches` forward and backward passes a rank.

    Gradients travel as they are kept (`gradient_bytes`), those of trained parameters only; weights in `weight_bytes`.
    """
    weights = spec.parameters * spec.weight_bytes
    updated = spec.trained * spec.weight_bytes
    gradients = spec.trained * spec.gradient_bytes
    # All weights for the forward, again for the backward pass; gradients are reduced at once, for nobody keeps whole ones.
    whole_weights = micro_batches * (2 * weights + gradients)
    if scheme.in_node:
        local, nodes = ranks.per_node, ranks.nodes
        # each rank all-reduces its own part with the ranks that have the same one on the other nodes
        return Volume(once_round(whole_weights, local), 2 * once_round(micro_batches * gradients / local, nodes))
    gone_round = {
        0: 2 * gradients,  # reduced once a step
        1: gradients + updated,  # reduced once a step; every rank's updated weights
        2: micro_batches * gradients + updated,
        3: whole_weights,
    }
    return over_nodes(once_round(gone_round[scheme.stage], ranks.number), ranks)


def once_round(size: float, ranks: int) -> float:
    """Bytes that each of `ranks` sends in a reduce-scatter or an all-gather of `size` bytes."""
    return size * (ranks - 1) / ranks


def over_nodes(sent: float, ranks: Ranks) -> Volume:
    """Of a ring over all ranks, in which each sends `sent` bytes: the last rank of a node sends to the next node."""
    between = sent / ranks.per_node if ranks.nodes > 1 else 0.0
    return Volume(sent - between, between)
