"""The config.json files of published models, as on the hub, with the number of parameters of their weights."""

import json
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent / "published_models"


class Published(NamedTuple):
    kind: str
    parameters: int
    """Of the model with the head for `kind`; two classes."""
    unread: tuple[str, ...]
    """The keys that no code of transformers 5 reads."""
    config: Any = None


MODELS = {
    "Llama-3.2-1B": Published("causal-lm", 1_235_814_400, ()),
    "Qwen3-30B-A3B": Published("causal-lm", 30_532_122_624, ("max_window_layers",)),
    "deberta-v3-base": Published("text-classification", 184_423_682, ()),
    "gpt-oss-20b": Published("causal-lm", 20_914_757_184, ("experts_per_token", "initial_context_length", "quantization_config")),
    "gemma-3-1b-it": Published("causal-lm", 999_885_952, ("cache_implementation",)),
    "bert-base-uncased": Published("text-classification", 109_483_778, ("gradient_checkpointing", "position_embedding_type")),
    "gpt2": Published("causal-lm", 124_439_808, ("n_ctx", "task_specific_params")),
    "ModernBERT-base": Published(
        "text-classification",
        149_606_402,
        ("gradient_checkpointing", "layer_norm_eps", "position_embedding_type", "reference_compile", "repad_logits_with_grad"),
    ),
}
PUBLISHED = {
    name: published._replace(config=json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8")))
    for name, published in MODELS.items()
}
