"""Checkpointing gives equal gradients, also with dropout and PEFT, and each layer runs twice."""

from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from plugin_cases import Cases, Mutation, Part, Refused
from torch.profiler import profile
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForSequenceClassification

from hwopt import api
from hwopt.errors import PluginError
from hwopt.hardware.device import described
from hwopt.memory.forecast import planner
from hwopt.memory.shapes import Head
from hwopt.memory.trace.tracer import trace_plan
from hwopt.model.facts import ModelFacts
from hwopt.planning.memory_plan import CLOSED_FORM
from hwopt.plugin import Context, Observation, Recipe, verify
from hwopt.testing import TINY_LLAMA, plan_for, tiny_job, tiny_profile
from hwopt_plugins.adapter import Adapter, add_adapter
from hwopt_plugins.checkpointing import Checkpointing, repeated_layers

FACTS = ModelFacts("tiny", "bert", "BertForSequenceClassification", 10_000, 4, 32, 100, 512, False, True, True, True, 0.0)
SIZES = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 100}
CARD, CPU = described("T4", (7, 5), 16.0), described("CPU", None, 32.0)
IDS = torch.arange(24).reshape(3, 8)


def context():
    return Context(CARD, {}, FACTS, None)


def bert(dropout=0.0):
    torch.manual_seed(0)
    config = BertConfig(**SIZES, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
    return BertForSequenceClassification._from_config(config, attn_implementation="sdpa")


def llama_with_adapter():
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, pad_token_id=0)
    model = LlamaForSequenceClassification._from_config(config, attn_implementation="sdpa")
    return add_adapter(model, options=Adapter.Options(kind="lora", r=4, lora_alpha=8), task="SEQ_CLS")


def applied(model, layers="all", **options):
    recipe = Recipe()
    Checkpointing(Checkpointing.Options(layers=layers, **options)).apply(recipe, context())
    return recipe.model_steps[0](model, None)


def decided(hardware=CARD, facts=FACTS, **options):
    return Checkpointing(Checkpointing.Options(**options)).probe(Context(hardware, {}, facts, None))


def gradients(model):
    torch.manual_seed(1)
    with profile(acc_events=True) as profiler:
        model.train()(input_ids=IDS).logits.square().sum().backward()
    operators = Counter({event.key: event.count for event in profiler.key_averages()})
    run = SimpleNamespace(
        inner_model=model, observation=Observation(operators=operators), last_step_batch=SimpleNamespace(sizes=[(3, 8)])
    )
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, run


@pytest.mark.parametrize("build", [lambda: bert(0.3), llama_with_adapter], ids=["dropout", "adapter"])
@pytest.mark.parametrize("layers", ["all", "selective", 2])
def test_equal_gradients_and_evidence(build, layers):
    plain, plain_run = gradients(build())
    again, run = gradients(applied(build(), layers))
    assert plain.keys() == again.keys()
    assert any("lora_B" in name for name in again) == ("lora" in "".join(plain))
    for name in plain:
        torch.testing.assert_close(again[name], plain[name], rtol=0, atol=0, msg=name)
    plugin = Checkpointing(Checkpointing.Options(layers=layers))
    evidence = verify(plugin, run)
    assert evidence.status == "active", evidence.seen
    assert f"on in {2 if layers == 2 else 4} of 4 layers" in evidence.seen
    assert verify(plugin, plain_run).status == "inactive"


def test_recomputation_may_gather_weights_again():
    """As in stage 3 of ZeRO, whose hooks gather in the recomputation what the forward pass found gathered."""
    model, calls = applied(bert(), "selective"), Counter()

    def gather(module, inputs):
        calls[module] += 1
        if calls[module] > 1:
            module.weight.detach().clone().view(-1)

    plain, _ = gradients(bert())
    for layer in repeated_layers(model).values():
        layer.output.dense.register_forward_pre_hook(gather)
    again, _ = gradients(model)
    assert set(calls.values()) == {2}
    assert all(torch.equal(again[name], plain[name]) for name in plain)


def test_evidence_is_unknown_in_compiled_code():
    model = applied(bert())
    model._compiled_call_impl = model._call_impl
    sizes = SimpleNamespace(sizes=[(3, 8)])
    operators = {"aten::scaled_dot_product_attention": 2}  # raised by tracing
    run = SimpleNamespace(inner_model=model, observation=Observation(operators=operators), last_step_batch=sizes)
    assert "cannot be counted" in verify(Checkpointing(Checkpointing.Options()), run).seen


@pytest.mark.parametrize(
    ("options", "where", "kind", "why"),
    [
        ({}, {}, "apply", "all 4 layers"),
        ({"layers": 2}, {}, "apply", "one in 2 of 4"),
        ({"layers": 9}, {}, "fallback", "needs 9 layers, BertForSequenceClassification has 4"),
        ({"offload": True}, {}, "apply", "inputs in pinned host memory"),
        ({"offload": True}, {"hardware": CPU}, "fallback", "needs a CUDA device, found a CPU"),
        ({}, {"facts": replace(FACTS, supports_checkpointing=False)}, "skip", "does not support activation checkpointing"),
    ],
)
def test_decision_depends_on_hardware_model_and_options(options, where, kind, why):
    decision = decided(**where, **options)
    assert (decision.kind, why in decision.reason) == (kind, True)


def test_auto_is_the_fastest_that_fits_and_the_least_memory_without_a_forecast(tmp_path, monkeypatch):
    def chosen(rows):
        batch = (f"plugins.batch.train={rows}", "plugins.batch.eval=8", "plugins.batch.gradient_accumulation_steps=1")
        model = "model.config={model_type='bert', num_hidden_layers=4, vocab_size=1000}"
        given = ("data.train=absent.csv", "data.max_length=512", model, *batch)
        plan = api.resolve("t4_16gb", assignments=given, hardware="profile", strict=rows < 128, cache=tmp_path)
        entry = next(entry for entry in plan.entries if entry.name == "checkpointing")
        return entry.decision, entry.options.layers

    assert chosen(64) == ("skip", "auto"), "strict mode takes it too"
    assert [chosen(rows) for rows in (200, 256, 800)] == [("apply", "selective"), ("apply", "all"), ("apply", "all")]
    plan_memory = planner.plan_memory
    monkeypatch.setattr(planner, "plan_memory", lambda *given: replace(plan_memory(*given), tier=CLOSED_FORM))
    assert chosen(64) == ("apply", "all")


def test_model_without_checkpointable_layers_is_refused():
    with pytest.raises(PluginError, match="no GradientCheckpointingLayer"):
        applied(SimpleNamespace(named_modules=list, config=SimpleNamespace()))


class OnMeta(torch.autograd.graph.saved_tensors_hooks):
    """`save_on_cpu` of a device other than the CPU: moves tensors to the meta device, and back as the values it kept."""

    def __init__(self, pin_memory=False):
        kept = {}

        def pack(tensor):
            packed = tensor.to("meta")
            kept[id(packed)] = tensor.clone()
            return tensor.device, packed

        def unpack(packed):
            return kept[id(packed[1])] if packed[1].device.type == "meta" else packed[1]

        super().__init__(pack, unpack)


@pytest.mark.parametrize("build", [lambda: bert(0.3), llama_with_adapter], ids=["dropout", "adapter"])
def test_offload_moves_the_input_of_each_layer_and_changes_no_bit(build, monkeypatch):
    plain, _ = gradients(build())
    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", OnMeta)
    offloaded, run = gradients(applied(build(), offload=True))
    for name in plain:
        torch.testing.assert_close(offloaded[name], plain[name], rtol=0, atol=0, msg=name)
    plugin = Checkpointing(Checkpointing.Options(offload=True))
    evidence = verify(plugin, run)
    assert evidence.status == "active", evidence.seen
    inputs = 4 * IDS.numel() * SIZES["hidden_size"] * 4
    assert f"4 inputs, {inputs / 2**20:,.1f} MiB, moved to host memory" in evidence.seen
    assert next(iter(repeated_layers(run.inner_model).values()))._gradient_checkpointing_func.bytes == inputs


def test_evidence_is_inactive_if_nothing_moved():
    _, run = gradients(applied(bert(), offload=True))  # the inputs are in host memory already
    evidence = verify(Checkpointing(Checkpointing.Options(offload=True)), run)
    assert (evidence.status, "no input of a layer was moved" in evidence.seen) == ("inactive", True)


def test_forecast_of_offload_counts_device_and_host(tmp_path):
    layers, hidden, rows, width = 3, 96, 4, 250
    config = TINY_LLAMA | {"hidden_size": hidden, "num_hidden_layers": layers, "max_position_embeddings": 512}
    card = described("a card", (8, 6), 24.0)

    def trace(**options):
        tables = {"checkpointing": options, "precision": {"dtype": "bf16", "level": "pure"}, "sdpa": {}, "batch": {"train": rows}}
        return trace_plan(
            plan_for(tiny_profile(**tables), tiny_job(tmp_path, "causal-lm", config=config), hardware=card), width, Head(2)
        )

    plain, offloaded = trace().train.at(rows, width), trace(offload=True).train.at(rows, width)
    assert plain.host_bytes() == 0
    assert offloaded.host_bytes() == layers * 2**18  # inputs of 4 x 250 x 96 x 2 bytes, rounded up to a power of two
    activations = [timeline.peak().parts["activations"] for timeline in (plain, offloaded)]
    assert activations[0] - activations[1] == layers * rows * width * hidden * 2


def no_recomputation(patch):
    import torch.utils.checkpoint

    patch.setattr(torch.utils.checkpoint, "checkpoint", lambda function, *inputs, **_: function(*inputs))


def layers_not_recomputed(patch, chosen):
    """torch's `checkpoint` stores the activations of the chosen layers."""
    import torch.utils.checkpoint

    numbers, real = {}, torch.utils.checkpoint.checkpoint

    def checkpoint(function, *inputs, **options):
        layer = getattr(getattr(function, "func", function), "__self__", function)
        return (function if chosen(numbers.setdefault(id(layer), len(numbers))) else partial(real, function, **options))(*inputs)

    patch.setattr(torch.utils.checkpoint, "checkpoint", checkpoint)


def half_stops(run):
    for layer in run.inner_model.model.layers[::2]:  # `checkpoint` is bound already
        layer.gradient_checkpointing = False


CASES = Cases(
    invalid=(({"layers": "selective", "offload": True}, 'set layers = "all"'), ({"layers": 0}, "greater than or equal to 1")),
    conflicts=(Refused("compile", "[plugins.checkpointing]\noffload = true\n[plugins.compile]", on_card=True),),
    mutations=(
        Mutation("layers are not recomputed", no_recomputation, "0 of 2 with a backward"),
        Mutation("layers are not recomputed (selective)", no_recomputation, "0 of 2 with a backward", {"layers": "selective"}),
    ),
    parts=(Part("layers not recomputed", layers_not_recomputed, later=half_stops),),
)
