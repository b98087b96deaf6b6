"""What lets large models fit: its forecast against CUDA's allocator, its evidence, and that it adds no waits."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hwopt.hardware.device import GIB
from hwopt.memory.forecast.lengths import Lengths
from hwopt.memory.forecast.measured import measure
from hwopt.memory.forecast.planner import plan_memory
from hwopt.memory.shapes import Head, Shape
from hwopt.planning.plan import Plan
from hwopt.testing import TINY_LLAMA, plan_for, tiny_job, tiny_profile, train_tiny

pytestmark = pytest.mark.device("any")

LLAMA = TINY_LLAMA | {"vocab_size": 32_000, "hidden_size": 1024, "num_hidden_layers": 12, "intermediate_size": 2816}
LLAMA |= {"num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 4096}
FUSED = {"optimizer": {"name": "adamw_torch_fused"}}
PURE = FUSED | {"sdpa": {}, "precision": {"dtype": "bf16", "level": "pure"}}
IN_BACKWARD: dict[str, Any] = {"optimizer_in_backward": {}}
OFFLOAD = {"checkpointing": {"offload": True}}
ROWS, WIDTH = 4, 1024


def plan_with(folder: Path, tables: dict[str, Any], config: dict[str, Any] = LLAMA, rows: int = ROWS, **training: Any) -> Plan:
    """A plan for a language model with steps of one micro-batch, without clipping."""
    job = tiny_job(folder, "causal-lm", config=config, max_grad_norm=0.0, **training)
    return plan_for(tiny_profile(**(tables | {"batch": {"train": rows, "eval": rows}})), job)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("tables", "rows"),
    [
        pytest.param(PURE, ROWS, id="pure"),
        pytest.param(PURE | IN_BACKWARD, ROWS, id="in-backward"),
        pytest.param(PURE | OFFLOAD, ROWS, id="offload"),
        pytest.param(PURE | OFFLOAD | IN_BACKWARD | {"fused_loss": {"backend": "torch"}}, ROWS, id="all"),
        pytest.param(PURE | IN_BACKWARD | {"optimizer": {"name": "adamw_bnb_8bit"}}, ROWS, id="in-backward-8bit"),
        pytest.param(PURE | {"sdpa": {"prefer": ["eager"]}}, ROWS // 2, id="eager"),  # score matrices: 8 GiB for ROWS
        pytest.param(PURE | {"optimizer": {"name": "adamw_torch_8bit"}}, ROWS, id="torchao-8bit", marks=pytest.mark.soak),
        pytest.param(PURE | {"optimizer": {"name": "adamw_torch_4bit"}}, ROWS, id="torchao-4bit", marks=pytest.mark.soak),
    ],
)
def test_predicted_peak_matches_the_cuda_allocator(tables: dict[str, Any], rows: int, tmp_path: Path) -> None:
    plan = plan_with(tmp_path, tables, rows=rows)
    memory = plan_memory(plan, tmp_path / "cache", Lengths(None, WIDTH, 2, "this test"))
    assert memory.tier == "traced", memory.note
    torch._C._cuda_clearCublasWorkspaces()  # else those of an earlier test would not count
    real = measure(plan, Shape(memory.rows, memory.width), Head(2)).train
    # bitsandbytes makes its state in the first backward pass, between activations: other free blocks are left than in the trace
    late_state = "optimizer_in_backward" in tables and tables["optimizer"]["name"] == "adamw_bnb_8bit"
    error = 0.015 if late_state else 0.005
    assert memory.peak_gib * GIB == pytest.approx(real, rel=error)


def test_offload_keeps_layer_inputs_in_pinned_host_memory(tmp_path: Path) -> None:
    recorder = train_tiny(plan_with(tmp_path, PURE | OFFLOAD, TINY_LLAMA), tmp_path)
    evidence = next(evidence for entry, evidence in recorder.found if entry.name == "checkpointing")
    assert evidence.status == "active", evidence.seen
    assert "moved to host memory" in evidence.seen


def test_offload_forecasts_the_pinned_memory(tmp_path: Path) -> None:
    plan = plan_with(tmp_path, PURE | OFFLOAD)
    memory = plan_memory(plan, tmp_path / "cache", Lengths(None, WIDTH, 2, "this test"))
    inputs = LLAMA["num_hidden_layers"] * ROWS * WIDTH * LLAMA["hidden_size"] * 2
    assert memory.host_gib * GIB == inputs, "each input is a power of two"
    torch._C._host_emptyCache()  # else the run would take blocks of an earlier test
    torch.cuda.reset_peak_host_memory_stats()
    before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    measure(plan, Shape(ROWS, WIDTH), Head(2))
    assert torch.cuda.host_memory_stats()["allocated_bytes.peak"] - before == pytest.approx(inputs, rel=0.01)
