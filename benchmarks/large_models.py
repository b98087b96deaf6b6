"""Forecast of full fine-tuning and QLoRA of decoders of 1 to 8 billion parameters on cards of 8, 16 and 24 GB, as a table.

    python benchmarks/large_models.py [--rows 1] [--length 1024] [--model NAME] [--method NAME]

Plans each method with the memory planner, as `hwopt plan` does. Needs no GPU, weights or data. The table is in
docs/large-models.md.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

CARDS = {8: "GeForce RTX 3070", 16: "RTX A4000", 24: "GeForce RTX 3090"}
"""GB -> a card of compute capability 8.6."""

MODELS = {
    "1B": "model_type = 'llama', vocab_size = 128256, hidden_size = 2048, intermediate_size = 8192, num_hidden_layers = 16, "
    "num_attention_heads = 32, num_key_value_heads = 8, head_dim = 64, tie_word_embeddings = true",
    "3B": "model_type = 'llama', vocab_size = 128256, hidden_size = 3072, intermediate_size = 8192, num_hidden_layers = 28, "
    "num_attention_heads = 24, num_key_value_heads = 8, head_dim = 128, tie_word_embeddings = true",
    "8B": "model_type = 'llama', vocab_size = 128256, hidden_size = 4096, intermediate_size = 14336, num_hidden_layers = 32, "
    "num_attention_heads = 32, num_key_value_heads = 8, head_dim = 128, tie_word_embeddings = false",
}
"""The shapes of Llama-3.2-1B, Llama-3.2-3B and Llama-3.1-8B."""

PURE = '[plugins.precision]\ndtype = "bf16"\nlevel = "pure"\n'
SMALL_STEP = "[plugins.fused_loss]\n[plugins.checkpointing]\noffload = true\n"
METHODS = {
    "O1, fused AdamW": '[plugins.precision]\ndtype = "bf16"\n[plugins.checkpointing]\n',
    "O2, 8-bit (bitsandbytes)": '[plugins.precision]\ndtype = "bf16"\nlevel = "O2"\n'
    + SMALL_STEP
    + '[plugins.optimizer]\nname = "adamw_bnb_8bit"\n',
    "pure, fused AdamW": PURE + SMALL_STEP + '[plugins.optimizer]\nname = "adamw_torch_fused"\n',
    "pure, 8-bit (torchao)": PURE + SMALL_STEP + '[plugins.optimizer]\nname = "adamw_torch_8bit"\n',
    "pure, 8-bit (bitsandbytes)": PURE + SMALL_STEP + '[plugins.optimizer]\nname = "adamw_bnb_8bit"\n',
    "and in backward": PURE + SMALL_STEP + '[plugins.optimizer]\nname = "adamw_bnb_8bit"\n[plugins.optimizer_in_backward]\n',
    "QLoRA": "[plugins.adapter]\nalways = true\n[plugins.quantize]\n"
    + '[plugins.precision]\ndtype = "bf16"\nlevel = "O2"\n[plugins.fused_loss]\n[plugins.checkpointing]\n',
}
"""Name -> plugin tables; those of sdpa and batch are added."""


def profile_toml(gigabytes: int, method: str, rows: int) -> str:
    """A profile for the card of `gigabytes` GB with the tables of `method`, and one micro-batch per step."""
    return (
        f'name = "large"\n[card]\nmatch = ["{CARDS[gigabytes]}"]\nmemory_gib = {gigabytes}\ncompute_capability = "8.6"\n'
        f"{METHODS[method]}[plugins.sdpa]\n[plugins.batch]\ntrain = {rows}\neval = {rows}\n"
    )


def plan_of(folder: Path, model: str, method: str, gigabytes: int, options: argparse.Namespace) -> Any:
    """(plan, its memory plan)."""
    from hwopt import api
    from hwopt.memory.forecast.planner import plan_memory

    profile = folder / "large.toml"
    profile.write_text(profile_toml(gigabytes, method, options.rows))
    assignments = [
        f"model.config={{ {MODELS[model]}, max_position_embeddings = 8192 }}",
        "task.kind=causal-lm",
        "data.train=none.txt",
        f"data.max_length={options.length}",
        "training.max_grad_norm=0",
    ]
    plan = api.resolve(str(profile), assignments=assignments, hardware="profile")
    return plan, plan_memory(plan, api.cache_folder())


def show_row(folder: Path, model: str, method: str, options: argparse.Namespace) -> None:
    plans = [plan_of(folder, model, method, gigabytes, options)[1] for gigabytes in CARDS]
    first = plans[0]
    if first.tier != "traced":
        print(f"| {model} | {method} | not traced: {first.note} |", flush=True)
        return
    fits = [f"{gigabytes} GB" for gigabytes, memory in zip(CARDS, plans, strict=True) if memory.fits]
    sizes = f"{first.peak_gib:.1f} | {first.eval_peak_gib or 0.0:.1f} | {first.host_gib:.2f}"
    print(f"| {model} | {method} | {sizes} | {', '.join(fits) or '-'} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--model", choices=MODELS)
    parser.add_argument("--method", choices=METHODS)
    options = parser.parse_args()
    print("| model | method | training GiB | evaluation GiB | host GiB | fits |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for model in [options.model] if options.model else MODELS:
            for method in [options.method] if options.method else METHODS:
                show_row(Path(folder), model, method, options)


if __name__ == "__main__":
    main()
