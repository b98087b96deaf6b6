"""A trace that skips equal layers has the same storages, operations and peak as one that runs every layer."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from applied import Applied
from cases import examples, named
from hypothesis import given, settings
from hypothesis import strategies as st

from hwopt.config.job import make_job
from hwopt.config.toml import Document
from hwopt.hardware.device import described
from hwopt.memory.shapes import Head, Shape
from hwopt.memory.trace.layer_kinds import contexts, layer_kinds, layers_to_run
from hwopt.memory.trace.timeline import Timeline
from hwopt.memory.trace.tracing_process import NotTraceable, TraceRequest, traced
from hwopt.planning.plan import Plan
from hwopt.plugin import Context, Recipe
from hwopt.plugin.registry import Registry
from hwopt.testing import TINY_BERT, TINY_LLAMA, plan_for, tiny_job, tiny_profile

CARD = described("a card", (8, 6), 8.0)
BERT = TINY_BERT | {"num_hidden_layers": 8, "hidden_dropout_prob": 0.1}
LLAMA = TINY_LLAMA | {"num_hidden_layers": 9}
SMALL = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 64}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 1}
GEMMA3 = SMALL | {"head_dim": 16, "model_type": "gemma3_text", "num_hidden_layers": 14, "sliding_window": 8}
HYBRID = SMALL | {"head_dim": 16, "model_type": "qwen3_5_text", "num_hidden_layers": 12}
HYBRID |= {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
EXPERTS = SMALL | {"model_type": "qwen3_moe", "num_hidden_layers": 8, "moe_intermediate_size": 16}
EXPERTS |= {"num_local_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [0]}
O1: dict[str, Any] = {"precision": {"dtype": "bf16"}, "sdpa": {}}
O2: dict[str, Any] = {"precision": {"dtype": "bf16", "level": "O2"}, "sdpa": {}}
LORA = {"kind": "lora", "always": True}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "BERT": (BERT, {}),
    "BERT, O2, 8 bits": (
        BERT,
        {"precision": {"dtype": "fp16", "level": "O2"}, "sdpa": {}, "optimizer": {"name": "adamw_bnb_8bit"}},
    ),
    "Llama, one micro-batch": (LLAMA, O1 | {"batch": {"train": 8}}),
    "Llama, checkpointing": (LLAMA, O1 | {"checkpointing": {}}),
    "Llama, inputs of layers in host memory": (LLAMA, O1 | {"checkpointing": {"offload": True}}),
    "Llama, LoRA, inputs in host memory": (LLAMA, {"adapter": LORA} | O1 | {"checkpointing": {"offload": True}}),
    "Llama, checkpointing every third": (LLAMA, O1 | {"checkpointing": {"layers": 3}}),
    "Llama, selective checkpointing": (LLAMA, O2 | {"checkpointing": {"layers": "selective"}}),
    "Llama, LoRA": (LLAMA, {"adapter": LORA} | O1),
    "Llama, QLoRA": (
        LLAMA,
        {"adapter": LORA, "quantize": {}} | O2 | {"checkpointing": {}, "optimizer": {"name": "adamw_bnb_8bit"}},
    ),
    "Gemma 3": (GEMMA3, O1),
    "Gemma 3, DoRA": (GEMMA3, {"adapter": LORA | {"kind": "dora"}} | O1 | {"checkpointing": {}}),
    "layers with and without attention": (HYBRID, O1),
    "experts": (EXPERTS, {"adapter": LORA} | O2 | {"checkpointing": {}}),
}
USUAL = ("BERT, O2, 8 bits", "Llama, one micro-batch", "Llama, QLoRA", "Gemma 3", "experts")
USUAL = (*USUAL, "Llama, inputs of layers in host memory")


def daily_trace(test: Any) -> Any:
    return pytest.mark.integration(pytest.mark.daily(pytest.mark.filterwarnings("ignore")(test)))


def planned(folder: Path, config: dict[str, Any], plugins: dict[str, Any], registry: Registry | None = None) -> Plan:
    kind = "text-classification" if config["model_type"] == "bert" else "causal-lm"
    document = tiny_job(folder, kind).document
    tables = document.data | {"model": {"config": config}, "task": {"kind": kind, "ignore_router_loss": True}}
    return plan_for(tiny_profile(**plugins), make_job(Document(document.name, tables)), registry, hardware=CARD)


def in_order(timeline: Timeline) -> list[list[int]]:
    """Return the allocations in order, each followed by what is released before the next one, sorted.

    Autocast releases its copies of the weights in the order of a hash table, which differs in each process.
    """
    found: list[list[int]] = []
    for event in timeline.events.tolist():
        if event > 0:
            found.append([event])
        else:
            found[-1].append(event)
    return [[first, *sorted(rest)] for first, *rest in found]


def check_equal_to_whole(plan: Plan) -> None:
    shapes = (("base", Shape(4, 32)),)
    traced(
        TraceRequest(plan, Head(2), shapes)
    )  # tensors that a library makes when it is imported are part of the first trace only
    whole = traced(TraceRequest(plan, Head(2), shapes, layers="all"))
    extended = traced(TraceRequest(plan, Head(2), shapes, layers="few"))
    assert whole.keys() == extended.keys() == {"train.base", "eval.base"}
    for name, expected in whole.items():
        found = extended[name]
        assert in_order(found) == in_order(expected), name
        for key in ("sizes", "kinds", "column_sums", "operands", "ends", "flops", "dtypes", "host_sizes"):
            np.testing.assert_array_equal(getattr(found, key), getattr(expected, key), f"{name} {key}")
        assert found.peak() == expected.peak()
    found, expected = extended["train.base"], whole["train.base"]
    assert (found.update, found.before, found.phases.tolist()) == (expected.update, expected.before, expected.phases.tolist())


@daily_trace
@pytest.mark.parametrize("case", named(CASES, USUAL))
def test_extended_trace_equals_the_whole_trace(case: tuple[dict[str, Any], dict[str, Any]], tmp_path: Path) -> None:
    check_equal_to_whole(planned(tmp_path, *case))


class OddLayer(Applied):
    """Makes one layer in the middle of the stack wider than the others."""

    name = "odd_layer"

    def apply(self, recipe: Recipe, context: Context) -> None:
        recipe.model_steps.append(self.widen)

    def widen(self, model: Any, run: Any) -> Any:
        mlp = model.model.layers[4].mlp
        for name, shape in (("gate_proj", (96, 32)), ("up_proj", (96, 32)), ("down_proj", (32, 96))):
            getattr(mlp, name).weight = torch.nn.Parameter(torch.ones(shape))
        return model


class CountingLayers(OddLayer):
    """Makes a layer run other operations than its neighbours, which its attributes do not show."""

    name = "counting_layers"

    def widen(self, model: Any, run: Any) -> Any:
        kept: list[Any] = []
        for layer in model.model.layers:
            layer.mlp.act_fn = Counting(kept)
        return model


class Counting(torch.nn.Module):
    def __init__(self, kept: list[Any]) -> None:
        super().__init__()
        self.calls = (kept, Calls())

    def forward(self, x: Any) -> Any:
        calls = self.calls[1]
        calls.number += 1
        return (x.exp() if calls.number == 2 else x).sigmoid()


class Calls:
    """The number of calls of all layers together."""

    number = 0

    def __setattr__(self, name: str, value: int) -> None:
        setattr(type(self), name, value)


@daily_trace
def test_one_layer_that_differs_is_run(tmp_path: Path) -> None:
    registry = Registry()
    registry.add(OddLayer)
    check_equal_to_whole(planned(tmp_path, LLAMA | {"num_hidden_layers": 12}, O1 | {"odd_layer": {}}, registry))


@daily_trace
def test_layers_that_run_other_operations_are_all_run(tmp_path: Path) -> None:
    registry = Registry()
    registry.add(CountingLayers)
    plan = planned(tmp_path, LLAMA, {"counting_layers": {}}, registry)
    shapes = (("base", Shape(4, 32)),)
    with pytest.raises(NotTraceable, match="NotRepeated: layers 6 and 7 run other operations"):
        traced(TraceRequest(plan, Head(2), shapes, layers="few"))
    whole, usual = (traced(TraceRequest(plan, Head(2), shapes, layers=layers))["train.base"] for layers in ("all", None))
    assert in_order(usual) == in_order(whole)
    assert usual.peak() == whole.peak()


@pytest.mark.filterwarnings("ignore")
def test_layer_that_computes_token_after_token_is_not_traced(tmp_path: Path) -> None:
    """A loop of Mamba over 300 tokens, which a run on a card without its kernels also does."""
    mamba = {"model_type": "mamba", "vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 8, "state_size": 4}
    mamba["use_associative_scan"] = False  # transformers 5.10 has another way for fake tensors
    request = TraceRequest(planned(tmp_path, mamba, {}), Head(2), (("base", Shape(2, 300)),))
    with pytest.raises(NotTraceable, match="SequentialScan: a layer runs more than 800 operations for 300 tokens"):
        traced(request)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=14), st.integers(1, 4))
@settings(max_examples=examples(100))
def test_layers_to_run_show_every_neighbourhood(period: list[int], times: int) -> None:
    kinds = period * times
    kept = layers_to_run(kinds)
    assert kept == sorted(set(kept))
    found, all_of_them = Counter(contexts([kinds[number] for number in kept])), Counter(contexts(kinds))
    assert found.keys() == all_of_them.keys()
    most, count = all_of_them.most_common(1)[0]
    assert found[most] >= min(2, count)


def test_few_layers_of_a_deep_stack_are_run() -> None:
    assert [len(layers_to_run(kinds)) for kinds in ([0] * 80, ([0] * 5 + [1]) * 4 + [0, 0])] == [4, 7]  # Llama, Gemma 3


def test_layer_kinds_ignore_only_the_number_of_the_layer() -> None:
    layers = [torch.nn.Linear(2, 2) for _ in range(6)]
    for number, layer in enumerate(layers):
        layer.layer_idx, layer.scale = number, 1.0
    assert layer_kinds(layers) == [0] * 6
    layers[2].scale = 2.0
    layers[4].weight.requires_grad = False
    assert layer_kinds(layers) == [0, 0, 1, 0, 2, 0]
