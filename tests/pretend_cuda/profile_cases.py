"""What each shipped profile trains on its pretend card."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

BERT_BASE = {"model_type": "bert", "vocab_size": 30522}
GEMMA = {  # Gemma 3 1B with 8 of its 26 layers and a smaller vocabulary
    "model_type": "gemma3_text",
    "vocab_size": 32_000,
    "hidden_size": 1152,
    "num_hidden_layers": 8,
    "intermediate_size": 6912,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "max_position_embeddings": 1024,
}
LLAMA = {  # TinyLlama-1.1B with 2 of its 22 layers: with ZeRO the optimizer state is in host memory
    "model_type": "llama",
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "num_hidden_layers": 2,
    "intermediate_size": 5632,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
}


@dataclass(frozen=True)
class Case:
    """What a profile trains, and on which card."""

    card: str
    model_name: str = "BERT-base"
    config: dict[str, Any] = field(default_factory=lambda: BERT_BASE)
    kind: str = "text-classification"
    max_length: int = 192
    changes: tuple[str, ...] = ()
    """Further arguments of `--set`."""
    same_as: str = ""
    """The profile whose bare loop and Trainer are the same: equal model, sizes, optimizer and precision."""


def decoder(card: str, model_name: str, config: dict[str, Any], max_length: int, *changes: str) -> Case:
    return Case(card, model_name, config, "causal-lm", max_length, changes)


ADAPTER = "plugins.adapter.always=true"
"""Without it the plugin skips models of less than half a billion parameters."""


CASES = {
    "rtx3070_8gb": Case("rtx3070"),
    "rtx3070_8gb_batch16": Case("rtx3070"),
    "rtx3070_8gb_qlora": decoder("rtx3070", "TinyLlama, 2 layers", LLAMA, 512, ADAPTER),
    "rtx3070_8gb_zero": decoder("rtx3070", "TinyLlama, 2 layers", LLAMA, 512),
    "rtx3060_12gb": Case("rtx3060"),
    "rtx4060_8gb": Case("rtx4060"),
    "t4_16gb": Case("t4"),
    "t4_16gb_zero": decoder("t4", "TinyLlama, 2 layers", LLAMA, 512),
    "rtx3090_24gb": decoder("rtx3090", "Gemma 3, 8 layers", GEMMA, 256, ADAPTER),
    "rtx3090_24gb_experimental": decoder("rtx3090", "Gemma 3, 8 layers", GEMMA, 256, ADAPTER),
    "rtx3090_24gb_max_perf": decoder("rtx3090", "Gemma 3, 8 layers", GEMMA, 256, ADAPTER),
    "rtx4090_24gb": Case("rtx4090", same_as="h100_80gb"),
    "rtx5090_32gb": Case("rtx5090", same_as="h100_80gb"),
    "a10_24gb": Case("a10", same_as="h100_80gb"),
    "l4_24gb": Case("l4", same_as="h100_80gb"),
    "a100_40gb": Case("a100_40", same_as="h100_80gb"),
    "a100_80gb": Case("a100", same_as="h100_80gb"),
    "h100_80gb": Case("h100"),
    "h200_141gb": Case("h200", same_as="h100_80gb"),
}
PLAIN = {
    "precision": "plugins.precision.level=O1",
    "length_batching": "plugins.length_batching.enabled=false",
    "zero": "plugins.zero.enabled=false",
    "fused_loss": "plugins.fused_loss.enabled=false",
}
"""Plugin -> the change with which a bare loop trains: autocast, whole micro-batches, no DeepSpeed, the model's loss."""
MAY_BE_INACTIVE = {"adapter", "tf32"}
"""Plugins whose evidence may be inactive. That of `adapter` reads gradients, and a pretend card computes none of a large model.
That of `tf32` needs a product in fp32, and with autocast or half weights there is none."""
NO_CARD = {
    "cpu": "trains on the CPU",
    "mi300x_192gb": "an AMD GPU",
    "rx7900xtx_24gb": "an AMD GPU",
    "v100_16gb": "the CUDA 13 build of torch has no kernels for Volta",
    "v100_32gb": "the CUDA 13 build of torch has no kernels for Volta",
}
"""Shipped profile -> why it does not run on a pretend card."""
