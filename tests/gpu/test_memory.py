"""Predicted memory against CUDA's allocator, on the card that is there. Valid on any CUDA device: only sizes count."""

import gc
import json
import random
from pathlib import Path
from typing import Any

import bitsandbytes.functional
import pytest
import torch
from event_calls import calling

from hwopt.hardware.device import GIB
from hwopt.memory.allocator.caching_allocator import Block, CachingAllocator
from hwopt.memory.allocator.playback import played_run
from hwopt.memory.forecast.measured import measure
from hwopt.memory.forecast.planner import plan_memory
from hwopt.memory.shapes import Head, Shape, accumulates_gradients
from hwopt.memory.trace.tracer import trace_plan
from hwopt.plugin import RunView
from hwopt.testing import TINY_BERT, TINY_LLAMA, plan_for, tiny_job, tiny_profile, train_tiny
from hwopt_plugins.allocator import allocator_settings

pytestmark = pytest.mark.device("any")

SIZES: dict[str, Any] = {"hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8}
BERT = TINY_BERT | SIZES | {"intermediate_size": 2048, "vocab_size": 8000, "max_position_embeddings": 2048}
BERT |= {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
LLAMA = TINY_LLAMA | SIZES | {"intermediate_size": 1408, "vocab_size": 32_000, "max_position_embeddings": 4096}
LLAMA |= {"num_key_value_heads": 4}
TIED = LLAMA | {"tie_word_embeddings": True}
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
        {"precision": {"dtype": "fp16"}, "sdpa": {"prefer": ["eager"]}} | FUSED,
        {"precision": {"dtype": "bf16"}, "sdpa": {}, "allocator": {}} | FUSED,
    ],
    ids=["fp32", "bf16", "O2-8bit", "checkpointing", "dora", "fused-loss", "eager", "expandable"],
)
def test_predicted_memory_is_that_of_the_cuda_allocator(
    config: dict[str, Any], width: int, tables: dict[str, Any], tmp_path: Path
) -> None:
    job = tiny_job(tmp_path, "text-classification" if config is BERT else "causal-lm", config=config)
    plan = plan_for(tiny_profile(**tables), job)
    trace, rows = trace_plan(plan, width, Head(2)), max(1, 8192 // width)
    assert accumulates_gradients(plan)
    predicted = played_run([trace.train.at(rows, width)] * 2, [trace.eval.at(rows, width)])
    available = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    try:
        real = measure(plan, Shape(rows, width), Head(2))
    except torch.OutOfMemoryError:  # score matrices of 2,048 tokens on a card of 8 GiB
        assert predicted.reserved > available
        return
    assert predicted.train.bytes == pytest.approx(real.train, rel=0.005)
    assert predicted.eval.bytes == pytest.approx(real.eval, rel=0.005)
    assert predicted.reserved == pytest.approx(real.reserved, rel=0.05)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("config", "tables"),
    [(BERT, {}), (BERT, {"checkpointing": {}}), (TIED, {}), (TIED, {"fused_loss": {"backend": "torch"}})],
    ids=["bert", "checkpointing", "tied", "tied-fused-loss"],
)
def test_gradients_in_half_precision_wait_for_their_cast_in_later_micro_batches(
    config: dict[str, Any], tables: dict[str, Any], tmp_path: Path
) -> None:
    """Micro-batches so small that the gradients decide the peak. With checkpointing each one casts the weights itself."""
    job = tiny_job(tmp_path, "text-classification" if config is BERT else "causal-lm", config=config)
    plan = plan_for(tiny_profile(sdpa={}, precision={"dtype": "bf16"}, **tables, **FUSED), job)
    trace = trace_plan(plan, 16, Head(2))
    predicted = played_run([trace.train.at(2, 16)] * 2, [trace.eval.at(2, 16)])
    assert predicted.train.bytes == pytest.approx(measure(plan, Shape(2, 16), Head(2)).train, rel=0.005)


SKIP = {"on_nonfinite": "skip"}  # kernels of a pretend card write no values
FULL: dict[str, Any] = {"precision": {"dtype": "bf16", "level": "pure"}, "sdpa": {}} | FUSED
LENGTHS = (400, 100, 300, 200)
QLORA: dict[str, Any] = {
    "adapter": {"kind": "lora", "always": True},
    "quantize": {},
    "precision": {"dtype": "bf16"},
    "sdpa": {},
    "checkpointing": {},
    "optimizer": {"name": "paged_adamw_8bit"},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("tables", "lengths"),
    [
        (QLORA | {"pack": {}}, LENGTHS),
        (QLORA, LENGTHS),
        (FULL, LENGTHS),
        (FULL | {"fused_loss": {"backend": "torch"}}, LENGTHS),
        (FULL | {"precision": {"dtype": "bf16"}}, LENGTHS),
        (FULL | {"allocator": {}}, LENGTHS),
        (FULL | {"allocator": {}, "fused_loss": {"backend": "torch"}, "pack": {}}, LENGTHS),
        (FULL | {"length_batching": {}}, LENGTHS),
        (FULL | {"pack": {}}, (400, *(30,) * 31)),
    ],
    ids=["packed", "padded", "full", "fused-loss", "autocast", "expandable", "expandable-fused-packed", "by-length", "one-long"],
)
def test_a_run_reserves_what_the_plan_says(tables: dict[str, Any], lengths: tuple[int, ...], tmp_path: Path) -> None:
    """Weights that were quantized leave free blocks, which no step can use; the evaluation is larger than a step; the first of
    two micro-batches makes gradients between its activations; most packed steps are smaller than one of the longest documents."""
    max_steps, evaluated = (2, 8) if lengths == LENGTHS else (5, 1)  # of one epoch and a step more, measured before it
    config = LLAMA | {"vocab_size": 128_000}
    job = tiny_job(tmp_path / "data", "causal-lm", config=config, data={"max_length": 400}, max_steps=max_steps, **SKIP)
    rows = [json.dumps({"text": " ".join(["red"] * length)}) for length in lengths]
    for name in ("train", "eval"):
        (tmp_path / "data" / f"{name}.jsonl").write_text("\n".join((rows * 8)[:32]))
    plan = plan_for(tiny_profile(**tables, batch={"train": 4, "eval": evaluated, "gradient_accumulation_steps": 2}), job)
    forecast = plan_memory(plan, tmp_path / "cache").reserved_gib
    reserved: list[int] = []

    def count(view: RunView) -> None:
        reserved.append(torch.cuda.memory_reserved())

    plan.recipe.events.append(calling(on_step_begin=count))
    train_tiny(plan, tmp_path)
    assert reserved[-1] / GIB == pytest.approx(forecast, rel=0.05), "before the last step"


@pytest.mark.filterwarnings("ignore")
def test_step_is_traced_after_a_backward_pass_on_the_device(tmp_path: Path) -> None:
    """A child that is forked from this process could not run autograd, nor initialize CUDA again."""
    weights = torch.ones(64, 64, device="cuda", requires_grad=True)
    (weights @ weights).sum().backward()
    torch.cuda.synchronize()
    plan = plan_for(tiny_profile(sdpa={}), tiny_job(tmp_path, config=BERT))
    assert plan_memory(plan, tmp_path / "cache").tier == "traced"


@pytest.mark.parametrize("expandable", [False, True], ids=["segments", "expandable"])
def test_caching_allocator_counts_what_torch_counts(expandable: bool) -> None:
    """The same random allocations and releases."""
    bitsandbytes.functional.name2qmap.clear()  # tables of earlier tests, which stay on the device
    before = allocator_settings()
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 0
    torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{expandable}")
    try:
        check_allocations(CachingAllocator(expandable), random.Random(7))
    finally:
        torch._C._accelerator_setAllocatorSettings(before or "expandable_segments:False")


def check_allocations(ours: CachingAllocator, generator: random.Random) -> None:
    live: list[tuple[torch.Tensor, Block]] = []
    for _ in range(2000):
        if live and generator.random() < 0.5:
            tensor, block = live.pop(generator.randrange(len(live)))
            ours.release(block)
            del tensor
        else:
            size = int(2 ** generator.uniform(0, 27))
            live.append((torch.empty(size, dtype=torch.uint8, device="cuda"), ours.allocate(size)))
        assert (ours.allocated, ours.reserved) == (torch.cuda.memory_allocated(), torch.cuda.memory_reserved())
