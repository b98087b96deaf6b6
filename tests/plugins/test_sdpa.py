"""The order of kernels on each card, real kernels seen by the profiler, and the refusal of a kernel alone."""

from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from plugin_cases import LAYERS, Cases, Mutation, Part
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends, sdpa_kernel
from torch.profiler import profile
from transformers import BertConfig, BertForSequenceClassification

from hwopt.config.task_kinds import task_facts
from hwopt.hardware.device import described
from hwopt.model.config import load_config
from hwopt.model.facts import ModelFacts, model_facts
from hwopt.plugin import Context, Observation, Recipe, verify
from hwopt.testing import plan_for, tiny_job, tiny_profile, train_tiny
from hwopt_plugins.sdpa import Sdpa, attention_kernels

FACTS = ModelFacts("tiny", "bert", "BertForSequenceClassification", 10_000, 2, 32, 100, 512, False, True, True, True, 0.0)


def context(capability, **facts):
    return Context(described("card", capability, 16.0), {}, ModelFacts(**{**vars(FACTS), **facts}), None)


def decided(capability, *prefer, **facts):
    options = Sdpa.Options(prefer=prefer) if prefer else Sdpa.Options()
    return Sdpa(options).probe(context(capability, **facts))


def observed(dropout, kernels):
    """A run of a tiny BERT after a real forward and backward pass of one step."""
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=100,
        attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    model = BertForSequenceClassification._from_config(config, attn_implementation="sdpa")
    with attention_kernels(kernels), profile() as profiler:
        model.train()(input_ids=torch.randint(0, 100, (2, 8))).logits.sum().backward()
    operators = Counter({event.key: event.count for event in profiler.key_averages()})
    return SimpleNamespace(inner_model=model, observation=Observation(operators=operators))


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0)])
def test_all_kernels_apply_from_ampere_on(capability):
    assert decided(capability).kind == "apply"


@pytest.mark.parametrize("capability", [(7, 5), (7, 0)])
def test_older_cards_fall_back_to_their_kernels(capability):
    decision = decided(capability)
    assert (decision.kind, decision.options[0].prefer) == ("fallback", ("efficient", "math"))
    assert "needs compute capability 8.0" in decision.reason
    assert f"found compute capability {capability[0]}.{capability[1]}" in decision.reason
    assert decided(capability, "efficient", "math").kind == "apply"


def test_cpu_order_depends_on_dropout():
    assert decided(None).options[0].prefer == ("flash", "math")
    assert decided(None, "cudnn", "math").options[0].prefer == ("flash", "math")
    dropout = decided(None, attention_dropout=0.1)
    assert (dropout.kind, dropout.options[0].prefer) == ("fallback", ("math", "flash"))
    assert "needs attention dropout 0 in training, found 0.1" in dropout.reason
    assert decided(None, "math", "flash", attention_dropout=0.1).kind == "apply"


def test_dropout_of_t5_is_known():
    """Its config has one rate for all of its dropouts."""
    config = load_config(None, {"model_type": "t5", "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4})
    assert model_facts(config, task_facts("seq2seq-lm"), "t5").attention_dropout == 0.1


def test_remaining_kernels_are_valid_options():
    options = decided((7, 5), "flash", "math").options[0]
    assert options.prefer == ("efficient", "math")
    assert Sdpa.Options.model_validate_json(options.model_dump_json()) == options


def test_model_without_sdpa_is_skipped():
    decision = decided((8, 0), supports_sdpa=False)
    assert decision.kind == "skip"
    assert "BertForSequenceClassification" in decision.reason


def test_eager_attention_calls_no_kernel(tmp_path):
    """The baseline: in a real run, eager attention calls no attention kernel of torch."""
    recorder = train_tiny(
        plan_for(tiny_profile(sdpa={"prefer": ["eager"]}), tiny_job(tmp_path, samples=8, max_steps=1)), tmp_path
    )
    ((entry, evidence),) = [each for each in recorder.found if each[0].name == "sdpa"]
    assert (entry.decision, evidence.status) == ("apply", "active")
    assert evidence.seen == "attn_implementation eager; calls in step 1: no attention kernel"


def test_evidence_of_a_kernel_in_place_of_eager_attention():
    evidence = verify(Sdpa(Sdpa.Options(prefer=("eager",))), observed(0.0, ("flash", "math")))
    assert evidence.status == "inactive"


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
