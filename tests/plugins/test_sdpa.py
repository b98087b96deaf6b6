"""The order of kernels on each card, real kernels seen by the profiler, and the refusal of a kernel alone."""

from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from plugin_cases import LAYERS, Cases, Mutation, Part
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends, sdpa_kernel
from torch.profiler import profile
from transformers import BertConfig, BertForSequenceClassification, T5Config, T5ForConditionalGeneration

from hwopt.hardware.device import described
from hwopt.model.facts import ModelFacts
from hwopt.plugin import Context, Observation, Recipe, verify
from hwopt.testing import plan_for, tiny_job, tiny_profile, train_tiny
from hwopt.training.evidence import observing
from hwopt_plugins.sdpa import Sdpa, attention_kernels

FACTS = ModelFacts("tiny", "bert", "BertForSequenceClassification", 10_000, 2, 32, 100, 512, False, True, True, True, 0.0)


def context(capability, **facts):
    return Context(described("card", capability, 16.0), {}, ModelFacts(**{**vars(FACTS), **facts}), None)


def decided(capability, *prefer, **facts):
    options = Sdpa.Options(prefer=prefer) if prefer else Sdpa.Options()
    return Sdpa(options).probe(context(capability, **facts))


def bert(dropout):
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=100,
        attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    return BertForSequenceClassification._from_config(config, attn_implementation="sdpa")


def observed(dropout, kernels):
    """A run of a tiny BERT after a real forward and backward pass of one step."""
    model = bert(dropout)
    with attention_kernels(kernels), profile() as profiler:
        model.train()(input_ids=torch.randint(0, 100, (2, 8))).logits.sum().backward()
    operators = Counter({event.key: event.count for event in profiler.key_averages()})
    return SimpleNamespace(inner_model=model, device=torch.device("cpu"), observation=Observation(operators=operators))


@pytest.mark.parametrize(
    ("capability", "prefer", "facts", "kind", "kept", "why"),
    [
        ((8, 0), (), {}, "apply", (), "flash, efficient, cudnn, math in this order"),
        ((7, 5), (), {}, "fallback", ("efficient", "math"), "found compute capability 7.5"),
        ((7, 5), ("flash", "math"), {}, "fallback", ("efficient", "math"), "takes efficient, math"),
        ((7, 5), ("efficient", "math"), {}, "apply", (), "efficient, math"),
        (None, (), {}, "fallback", ("flash", "math"), "takes flash, math"),
        (None, (), {"attention_dropout": 0.1}, "fallback", ("math", "flash"), "needs attention dropout 0 in training, found 0.1"),
        (None, ("math", "flash"), {"attention_dropout": 0.1}, "apply", (), "math, flash"),
        ((8, 0), (), {"supports_sdpa": False}, "skip", (), "BertForSequenceClassification does not support"),
    ],
)
def test_order_of_kernels_depends_on_hardware_and_dropout(capability, prefer, facts, kind, kept, why):
    decision = decided(capability, *prefer, **facts)
    assert (decision.kind, why in decision.reason) == (kind, True), decision.reason
    assert [options.prefer for options in decision.options] == ([kept] if kept else [])


def test_eager_attention_calls_no_kernel(tmp_path):
    """The baseline: in a real run, eager attention calls no attention kernel of torch."""
    recorder = train_tiny(
        plan_for(tiny_profile(sdpa={"prefer": ["eager"]}), tiny_job(tmp_path, samples=8, max_steps=1)), tmp_path
    )
    ((entry, evidence),) = [each for each in recorder.found if each[0].name == "sdpa"]
    assert (entry.decision, evidence.status) == ("apply", "active")
    assert evidence.seen == "attn_implementation eager; calls in this step: no attention kernel"


def test_kernel_order_is_restored_after_the_block():
    recipe = Recipe()
    Sdpa(Sdpa.Options(prefer=("math", "flash"))).apply(recipe, context((8, 0)))
    assert recipe.model_kwargs == {"attn_implementation": "sdpa"}
    before = _cur_sdpa_kernel_backends(with_priority=True)
    with recipe.process[0]():
        assert [backend.name for backend in _cur_sdpa_kernel_backends(with_priority=True)] == ["MATH", "FLASH_ATTENTION"]
    assert _cur_sdpa_kernel_backends(with_priority=True) == before


def test_evidence_where_dropout_ruled_the_fused_kernel_out():
    evidence = verify(Sdpa(Sdpa.Options(prefer=("flash", "math"))), observed(0.1, ("flash", "math")))
    assert evidence.status == "inactive"
    assert "math 2" in evidence.seen
    evidence = verify(Sdpa(Sdpa.Options(prefer=("math", "flash"))), observed(0.1, ("math", "flash")))
    assert evidence.status == "active"


def test_evidence_beside_a_second_model_that_runs_another_kernel():
    """A guide or a reference in evaluation mode has no dropout, which rules flash out on a CPU."""
    model, guide, ids = bert(0.1).train(), bert(0.1).eval(), torch.randint(0, 100, (2, 8))
    run = SimpleNamespace(inner_model=model, device=torch.device("cpu"))
    with attention_kernels(("math", "flash")), observing(run):
        (model(input_ids=ids).logits - guide(input_ids=ids).logits).sum().backward()
    assert verify(Sdpa(Sdpa.Options(prefer=("math", "flash"))), run).status == "active"
    assert verify(Sdpa(Sdpa.Options(prefer=("flash", "math"))), run).status == "inactive"


@pytest.mark.skipif(not T5ForConditionalGeneration._supports_sdpa, reason="T5 of this transformers has its own attention")
@pytest.mark.parametrize(
    ("checkpointing", "math", "flash", "math_where_flash_can_run"),
    [(False, 4, 2, False), (True, 12, 0, False), (False, 6, 0, True)],
    ids=["self-attention in math", "checkpointing", "cross-attention in math"],
)
def test_evidence_of_trained_position_biases_on_a_cpu(checkpointing, math, flash, math_where_flash_can_run):
    """torch's flash kernel for CPUs computes no gradient for T5's position biases; where there are none it must run."""
    torch.manual_seed(0)
    config = T5Config(vocab_size=100, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, dropout_rate=0.0)
    config.decoder_start_token_id = 0
    model = T5ForConditionalGeneration(config).train()
    if checkpointing:
        (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)()
    run = SimpleNamespace(inner_model=model, device=torch.device("cpu"))
    ids = torch.randint(1, 100, (2, 8))
    order = (SDPBackend.MATH,) if math_where_flash_can_run else (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH)
    with sdpa_kernel(list(order)), observing(run):
        model(input_ids=ids, labels=ids).loss.backward()
    evidence = verify(Sdpa(Sdpa.Options(prefer=("flash", "math"))), run)
    assert evidence.status == ("inactive" if math_where_flash_can_run else "active"), evidence.seen
    assert f"math {math}" in evidence.seen
    assert (f"flash {flash}" in evidence.seen) == bool(flash)


def unfused_attention(query, key, value, attn_mask=None, **options):
    """`scaled_dot_product_attention` in single operations."""
    scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    return scores.softmax(-1) @ value


def no_fused_attention(patch):
    patch.setattr(torch.nn.functional, "scaled_dot_product_attention", unfused_attention)


def no_kernel_order(patch):
    """`sdpa_kernel` allows the math kernel only, whatever it is asked for."""
    import torch.nn.attention as attention

    real = attention.sdpa_kernel
    patch.setattr(attention, "sdpa_kernel", lambda backends, **_: real([attention.SDPBackend.MATH]))


def attention_with(patch, chosen, other):
    """The chosen calls of attention run `other` instead."""
    calls, real = [0], torch.nn.functional.scaled_dot_product_attention

    def attention(*inputs, **options):
        calls[0] += 1
        return (partial(other, real) if chosen((calls[0] - 1) % LAYERS) else real)(*inputs, **options)

    patch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)


def in_math(real, *inputs, **options):
    with sdpa_kernel([SDPBackend.MATH]):
        return real(*inputs, **options)


CASES = Cases(
    invalid=(
        ({"prefer": ["flash"]}, "Try ['flash', 'math']"),
        ({"prefer": ["eager", "math"]}, 'Use ["eager"], or remove eager'),
        ({"prefer": ["flash", "math", "flash"]}, "at least two different kernels"),
    ),
    mutations=(
        Mutation("torch has no fused attention", no_fused_attention, "found eager"),
        Mutation("the order of kernels has no effect", no_kernel_order, "found math"),
    ),
    parts=(
        Part("attention unfused", partial(attention_with, other=lambda real, *x, **options: unfused_attention(*x, **options))),
        Part("attention in the math kernel", partial(attention_with, other=in_math)),
    ),
)
