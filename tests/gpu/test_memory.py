"""Predicted peaks against CUDA's allocator, on the card that is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hwopt.memory.dry_run import Shape
from hwopt.memory.measured import measure_peak
from hwopt.memory.tracer import trace_plan
from hwopt.testing import TINY_BERT, plan_for, tiny_job, tiny_profile

pytestmark = pytest.mark.device("any")

BERT = TINY_BERT | {
    "hidden_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "intermediate_size": 2048,
    "vocab_size": 8000,
    "max_position_embeddings": 2048,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 32_000,
    "hidden_size": 512,
    "num_hidden_layers": 6,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
}
FUSED = {"optimizer": {"name": "adamw_torch_fused"}}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("config", [BERT, LLAMA], ids=["bert", "llama"])
@pytest.mark.parametrize("width", [128, 2048])
@pytest.mark.parametrize(
    "tables",
    [
        {"sdpa": {}, "optimizer": {"name": "adamw_torch"}},
        {"sdpa": {}, "precision": {"dtype": "bf16"}} | FUSED,
        {"sdpa": {}, "precision": {"dtype": "fp16", "level": "O2"}, "optimizer": {"name": "adamw_bnb_8bit"}},
        {"sdpa": {}, "precision": {"dtype": "bf16"}, "checkpointing": {}} | FUSED,
        {"adapter": {"kind": "dora", "always": True}, "precision": {"dtype": "bf16"}, "sdpa": {}} | FUSED,
        {"precision": {"dtype": "bf16"}, "fused_loss": {"backend": "torch"}, "sdpa": {}} | FUSED,
    ],
    ids=["fp32", "bf16", "O2-8bit", "checkpointing", "dora", "fused-loss"],
)
def test_predicted_peak_matches_the_cuda_allocator(
    config: dict[str, Any], width: int, tables: dict[str, Any], tmp_path: Path
) -> None:
    job = tiny_job(tmp_path, "text-classification" if config is BERT else "causal-lm", config=config)
    plan = plan_for(tiny_profile(**tables), job)
    trace, rows = trace_plan(plan, width, 2), max(1, 8192 // width)
    for what, scaled in (("train", trace.train), ("eval", trace.eval)):
        predicted = scaled.at(rows, width).peak().bytes
        assert predicted == pytest.approx(measure_peak(plan, Shape(rows, width), 2, what), rel=0.10), what
