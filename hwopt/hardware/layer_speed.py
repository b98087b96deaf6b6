"""How fast this CPU trains a layer of a model's size: measured in half a second, once for each CPU, torch and size.

What a CPU supports does not say what is faster on it: bf16 instructions speed up large products and slow down small ones, by the
casts; and what one more micro-batch costs depends on caches and cores. A plain encoder layer stands for the model's own.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import log2
from pathlib import Path
from typing import Any

TRIES = 4
"""Each time is the least of so many, in CPU time of one thread, the cases in turn: other programs may be busy. Threads that wait
for each other on busy cores take CPU time: with two threads, the ratio of bf16 was between 0.1 and 20 in five tries."""
SMALL, WIDTH = 32, 16
"""Tokens of the smaller micro-batch, and of a row."""
BESIDE_LAYERS = 2
"""What a micro-batch costs by itself, relative to its layers: the model's own code and the loop come on top. The demo
(128 tokens by its layers) trained 7 and 14 % faster with 256 on a two-core EPYC with AVX2, 2026-11-25."""
LARGEST = 1024
"""The largest hidden size that is measured: more takes seconds. There bf16 is faster wherever the CPU has it."""
LEAST, MOST = 16, 1024
"""Bounds of the price of a micro-batch in tokens: what is outside of them is noise."""


@dataclass(frozen=True)
class LayerSpeed:
    """Seconds of a forward and backward pass of an encoder layer."""

    token_seconds: float
    """For one more token of a micro-batch, in fp32."""
    micro_batch_seconds: float
    """For a micro-batch, in fp32, beside those of its tokens. Summed over the threads, of which the others wait."""
    bf16_ratio: float | None = None
    """Time in bf16 under autocast, relative to fp32; None for a CPU without bf16 instructions."""

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens that take as long as one more micro-batch does by itself: a power of two, as two measurements differ."""
        tokens = BESIDE_LAYERS * self.micro_batch_seconds / self.token_seconds
        return 1 << round(log2(min(MOST, max(LEAST, tokens))))


def cached(file: Path, measure: Callable[[], LayerSpeed]) -> LayerSpeed:
    """The speed in `file`, or the measured one, which is written there. An unwritable cache costs the time each time."""
    with suppress(OSError, ValueError, TypeError):
        return LayerSpeed(**json.loads(file.read_text(encoding="utf-8")))
    found = measure()
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(asdict(found)), encoding="utf-8")
    return found


def measured(hidden_size: int, bf16: bool) -> LayerSpeed:
    """The speed of a layer of this size on this CPU, with torch's present number of threads. `bf16`: measure it too."""
    import torch

    heads = hidden_size // 64 if hidden_size % 64 == 0 else 1
    most, threads = 256 if hidden_size <= 512 else 128, torch.get_num_threads()
    cases = [(SMALL, None), (most, None), *([(most, torch.bfloat16)] if bf16 else [])]
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):  # weights and dropout
            layer = torch.nn.TransformerEncoderLayer(hidden_size, heads, 4 * hidden_size, batch_first=True)
            rounds = [[seconds(layer, *case) for case in cases] for _ in range(1 + TRIES)]  # the first one warms up
    finally:
        torch.set_num_threads(threads)
    small, large, *half = map(min, zip(*rounds[1:], strict=True))
    token = max(large - small, 0.1 * large) / (most - SMALL)  # noise may make the small one the slower one
    return LayerSpeed(token, threads * max(0.0, small - SMALL * token), half[0] / large if half else None)


def seconds(layer: Any, tokens: int, dtype: Any) -> float:
    """The time of a forward and backward pass of `tokens` tokens, under autocast for a `dtype`."""
    import torch

    rows = torch.randn(tokens // WIDTH, WIDTH, layer.linear1.in_features)
    began = time.thread_time()
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        out = layer(rows)
    out.float().sum().backward()
    return time.thread_time() - began
