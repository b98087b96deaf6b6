"""What each shipped profile trains on its pretend card."""

from dataclasses import dataclass, field
from typing import Any

from hwopt.config.profile_files import profile_files
from pretend_cuda.cards import CARDS

BERT_BASE = {"model_type": "bert", "vocab_size": 30522}
# Gemma 3 1B with 8 of its 26 layers and a smaller vocabulary
GEMMA = {"model_type": "gemma3_text", "vocab_size": 32_000, "hidden_size": 1152, "num_hidden_layers": 8, "head_dim": 256}
GEMMA |= {"intermediate_size": 6912, "num_attention_heads": 4, "num_key_value_heads": 1, "max_position_embeddings": 1024}
# TinyLlama-1.1B with 2 of its 22 layers: with ZeRO the optimizer state is in host memory
LLAMA = {"model_type": "llama", "vocab_size": 32_000, "hidden_size": 2048, "num_hidden_layers": 2, "intermediate_size": 5632}
LLAMA |= {"num_attention_heads": 32, "num_key_value_heads": 4, "max_position_embeddings": 2048}


@dataclass(frozen=True)
class Case:
    """What a profile trains on its pretend card."""

    model_name: str = "BERT-base"
    config: dict[str, Any] = field(default_factory=lambda: BERT_BASE)
    kind: str = "text-classification"
    max_length: int = 192
    changes: tuple[str, ...] = ()
    """Further arguments of `--set`."""
    same_as: str = ""
    """The profile whose bare loop and Trainer are the same: equal model, sizes, optimizer and precision."""


def decoder(model_name: str, config: dict[str, Any], max_length: int, *changes: str) -> Case:
    return Case(model_name, config, "causal-lm", max_length, changes)


ADAPTER = "plugins.adapter.always=true"
"""Without it the plugin skips models of less than half a billion parameters."""


LIKE_H100 = Case(same_as="h100_80gb")
LIKE_GEMMA = decoder("Gemma 3, 8 layers", GEMMA, 256, ADAPTER)
OWN_CASES = {
    "rtx3070_8gb_qlora": decoder("TinyLlama, 2 layers", LLAMA, 512, ADAPTER),
    "rtx3070_8gb_zero": decoder("TinyLlama, 2 layers", LLAMA, 512),
    "t4_16gb_zero": decoder("TinyLlama, 2 layers", LLAMA, 512),
    **dict.fromkeys(("rtx3090_24gb", "rtx3090_24gb_experimental", "rtx3090_24gb_max_perf"), LIKE_GEMMA),
    **dict.fromkeys(("rtx4090_24gb", "rtx5090_32gb", "a10_24gb", "l4_24gb"), LIKE_H100),
    **dict.fromkeys(("a100_40gb", "a100_80gb", "h200_141gb"), LIKE_H100),
}
"""Profiles that train something else than BERT-base, or whose bare loops need no run of their own."""
VOLTA = "the CUDA 13 build of torch has no kernels for Volta"
NO_CARD = {"v100_16gb": VOLTA, "v100_32gb": VOLTA} | {name: "no CUDA card" for name in profile_files() if name not in CARDS}
"""Shipped profile -> why it does not run on a pretend card."""
CASES = {name: OWN_CASES.get(name, Case()) for name in profile_files() if name not in NO_CARD}
"""Shipped profile -> what it trains."""
PLAIN = {
    "precision": "plugins.precision.level=O1",
    "length_batching": "plugins.length_batching.enabled=false",
    "zero": "plugins.zero.enabled=false",
    "fused_loss": "plugins.fused_loss.enabled=false",
}
"""Plugin -> the change with which a bare loop trains: autocast, whole micro-batches, no DeepSpeed, the model's loss."""
MAY_BE_INACTIVE = {"adapter"}
"""Plugins whose evidence may be inactive. That of `adapter` reads gradients; a pretend card computes none of a large model."""
