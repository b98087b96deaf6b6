"""The price of one more micro-batch, in tokens, from the card and the model.

The host launches the kernels of a step while the device runs earlier ones, so a step takes the longer of the two times. One more
micro-batch costs the host its launches, and the device a pass over weights and gradients. Both are divided by the device's time
for a token. The price takes a slow host and a fast device: a split that does not lose there does not lose on others.

Source: roofline, Williams et al. 2009, with the profile's peak and bandwidth. docs/decisions/0016-price-of-a-micro-batch.md says
where the constants come from; tests/plugins/test_length_batching_price.py compares them with a traced step.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from hwopt.model.facts import ModelFacts
from hwopt.plugin.contract import Context

LAUNCHES = 4
"""Kernel launches of a forward and backward pass for each operation of the forward pass, with autocast: counted 2.5 to 4.1."""
HOST_SECONDS = 25e-6
"""Host time for a launch on a slow core, with all of Python and autograd. Fast cores take 8 to 15 us."""
KERNEL_SECONDS = 3e-6
"""Device time of a small kernel in a CUDA graph and of the gap after it: an H100 takes 5 ms for BERT-base with 1,024 tokens."""
PASSES, FROZEN_PASSES = 3, 2
"""Arithmetic of a forward and backward pass relative to the forward pass; if frozen weights have no gradients."""
VALUE_BYTES = 4
"""Bytes that a forward and backward pass moves for each value of the forward pass: two bytes, in both. Decoders move about 10."""
WEIGHT_BYTES, FROZEN_BYTES = 32, 8
"""Bytes that a micro-batch moves for each parameter: casts, two reads of the weights, and gradients that accumulate in fp32;
for a frozen one two reads, in two bytes or unpacked from four bits."""
REACHED, ORDINARY = 0.8, 0.4
"""Fraction of peak and bandwidth that large kernels reach at most, and that the kernels of BERT-base reached on an H200."""
OPERATIONS_PER_LAYER, VALUES_PER_LAYER = 80, 40
"""For a model that does not run on the meta device: operations, and values per token and element of the hidden size."""

FASTEST = {
    (6, 0): (21.0, 732),  # Tesla P100
    (7, 0): (130.0, 1134),  # Tesla V100S
    (7, 5): (130.5, 672),  # Quadro RTX 8000, Titan RTX
    (8, 0): (312.0, 2039),  # A100 80 GB SXM
    (8, 6): (155.0, 1008),  # RTX A6000; the bandwidth of a GeForce RTX 3090 Ti
    (8, 9): (364.0, 1008),  # RTX 6000 Ada; the bandwidth of a GeForce RTX 4090
    (9, 0): (989.0, 4800),  # H200 SXM
    (10, 0): (2250.0, 8000),  # B200
    (12, 0): (504.0, 1792),  # RTX PRO 6000 Blackwell
}
FASTEST_AMD = (1307.0, 5300.0)  # AMD's data sheet of the Instinct MI300X
"""Compute capability -> dense TFLOP/s in half precision and GB/s of its fastest card, for a card that the profile does not have.

Source: NVIDIA's data sheets."""


@dataclass(frozen=True)
class Price:
    """What one more micro-batch costs on a CUDA device."""

    host_seconds: float
    """Host time for a micro-batch."""
    device_seconds: float
    """Device time for a micro-batch that does not depend on its tokens."""
    token_seconds: float
    """Device time for a token."""
    launches: int
    """Kernels of a micro-batch."""
    basis: str
    """Where peak and bandwidth come from."""

    @property
    def host_tokens(self) -> int:
        """Tokens that the device computes while the host launches a micro-batch."""
        return ceil(self.host_seconds / self.token_seconds)

    @property
    def host_bound_tokens(self) -> int:
        """Tokens of the largest micro-batch whose launches take the host 10 % longer than the device needs; 0 if none does."""
        return max(0, int((self.host_seconds / 1.1 - self.device_seconds) / self.token_seconds))

    @property
    def graph_tokens(self) -> int:
        """`overhead_tokens` of a micro-batch in a CUDA graph, where small kernels are not hidden by the host's time."""
        return ceil((self.device_seconds + self.launches * KERNEL_SECONDS) / (self.token_seconds * REACHED / ORDINARY))

    @property
    def overhead_tokens(self) -> int:
        """Tokens that the device computes in the time of its own cost of a micro-batch."""
        return ceil(self.device_seconds / self.token_seconds)


def price_of(context: Context) -> Price:
    """The price of a micro-batch of the context's model on its card."""
    operations, flops, values = forward_cost(context.model)
    tflops, bandwidth, basis = peaks(context)
    moved = bandwidth * 1e9 * REACHED  # bytes a second
    launches, frozen = LAUNCHES * operations, context.model.frozen
    if context.job.model.chooses_weights and not frozen:
        basis += ", as if all weights were trained"
    return Price(
        host_seconds=launches * HOST_SECONDS,
        device_seconds=(FROZEN_BYTES if frozen else WEIGHT_BYTES) * context.model.parameters / moved,
        token_seconds=(FROZEN_PASSES if frozen else PASSES) * flops / (tflops * 1e12 * REACHED) + VALUE_BYTES * values / moved,
        launches=launches,
        basis=basis,
    )


def forward_cost(model: ModelFacts) -> tuple[int, float, float]:
    """(operations, FLOPs per token, values per token) of a forward pass; an estimate where the facts do not have them."""
    if model.operations:
        return model.operations, model.flops_per_token, model.values_per_token
    layers, hidden = max(model.layers, 1), max(model.hidden_size, 1)
    inside = max(model.parameters - model.vocab_size * hidden, 1)
    # experts: a token passes through some of them, with about the products of a dense model of this size
    return OPERATIONS_PER_LAYER * layers, 2.0 * min(inside, 12 * layers * hidden**2), VALUES_PER_LAYER * layers * hidden


def peaks(context: Context) -> tuple[float, float, str]:
    """(dense TFLOP/s, GB/s, their source): of the profile's card, else of the fastest card of the device's capability."""
    card, hardware = context.card, context.hardware
    known = [] if card is None else [peak for peak in card.dense_tflops.model_dump().values() if peak]
    if card is not None and card.memory_bandwidth_gbps and known:
        return max(known), card.memory_bandwidth_gbps, hardware.name
    if hardware.amd:
        return *FASTEST_AMD, "an AMD Instinct MI300X"
    found = max((key for key in FASTEST if key <= (hardware.compute_capability or (0, 0))), default=min(FASTEST))
    return *FASTEST[found], f"the fastest card of compute capability {found[0]}.{found[1]}"
