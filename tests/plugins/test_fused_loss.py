"""The fused loss equals the loss with logits in value, gradients and whole runs, and logits are never materialized."""

import tomllib
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cases import DAILY
from hypothesis import given
from hypothesis import strategies as st
from plugin_cases import Cases, Mutation, Part, Refused
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy, linear
from transformers import AutoModelForCausalLM

from hwopt.config.job import TaskOptions, make_job
from hwopt.config.task_kinds import task_facts
from hwopt.config.toml import Document
from hwopt.errors import PluginError
from hwopt.hardware.device import described
from hwopt.model.config import load_config
from hwopt.model.facts import ModelFacts, model_facts
from hwopt.planning.inputs import Inputs
from hwopt.plugin import Context, Observation, Recipe, verify
from hwopt.testing import TINY_BERT, TINY_LLAMA, logged, plan_for, relative_error, tiny_job, tiny_profile, train_tiny
from hwopt_plugins.fused_loss import FusedLoss
from hwopt_plugins.fused_loss.cross_entropy import chunked_cross_entropy, linear_cross_entropy

SIZES = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
GPT2 = {"model_type": "gpt2", "vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}  # tied, dropout 0.1
GEMMA = SIZES | {"model_type": "gemma3_text", "num_key_value_heads": 1, "head_dim": 16}  # tied
PHI = SIZES | {"model_type": "phi"}  # the output layer has a bias
T4, P100, CPU = described("T4", (7, 5), 16.0), described("P100", (6, 0), 16.0), described("CPU", None, 32.0)
LORA = {"adapter": {"always": True, "r": 4}}
BF16, O2 = {"precision": {"dtype": "bf16"}}, {"precision": {"dtype": "bf16", "level": "O2"}}


def samples(tokens, size, words, bias, dtype, seed=0, kept=0.7):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, size, generator=generator, dtype=dtype)
    weight = torch.randn(words, size, generator=generator, dtype=dtype)
    offset = torch.randn(words, generator=generator, dtype=dtype) if bias else None
    targets = torch.randint(0, words, (tokens,), generator=generator)
    targets[torch.rand(tokens, generator=generator) >= kept] = -100
    return hidden, weight, offset, targets


def with_gradients(loss, *tensors, factor=1.0):
    """The loss and its gradients with respect to `tensors`, times `factor`."""
    leaves = [None if x is None else x.clone().requires_grad_() for x in tensors]
    found = loss(*leaves)
    found.backward(torch.tensor(factor, dtype=found.dtype))
    return [found.detach(), *(x.grad for x in leaves if x is not None)]


def plain(targets):
    return lambda hidden, weight, bias: cross_entropy(
        linear(hidden, weight, bias).to(torch.promote_types(hidden.dtype, torch.float32)),
        targets,
        ignore_index=-100,
        reduction="sum",
    )


def fused(targets, chunks, **more):
    return lambda hidden, weight, bias: linear_cross_entropy(hidden, weight, bias, targets, chunks=chunks, **more)


def distance(a, b):
    """The distance of a and b relative to the norm of b."""
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@given(
    tokens=st.integers(1, 40),
    size=st.integers(1, 20),
    words=st.integers(2, 60),
    chunks=st.integers(1, 50),
    bias=st.booleans(),
    kept=st.sampled_from([0.0, 0.1, 0.7, 1.1]),
    factor=st.sampled_from([1.0, 0.013, -3.0]),
    seed=st.integers(0, 2**31),
)
def test_loss_and_gradients_match_those_with_logits(dtype, tolerance, tokens, size, words, chunks, bias, kept, factor, seed):
    *tensors, targets = samples(tokens, size, words, bias, dtype, seed, kept)
    wanted = with_gradients(plain(targets), *tensors, factor=factor)
    found = with_gradients(fused(targets, chunks), *tensors, factor=factor)
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert distance(ours, theirs) <= tolerance
    with torch.no_grad():
        assert distance(fused(targets, chunks)(*tensors), wanted[0]) <= tolerance


def test_large_logits_and_batches_without_a_label_are_exact():
    hidden, weight, bias, targets = samples(9, 4, 12, True, torch.float32)
    wanted = with_gradients(plain(targets), 1e3 * hidden, weight, bias)
    for ours, theirs in zip(with_gradients(fused(targets, 4), 1e3 * hidden, weight, bias), wanted, strict=True):
        assert distance(ours, theirs) <= 1e-5
    found = with_gradients(fused(torch.full_like(targets, -100), 4), hidden, weight, bias)
    assert all(not x.any() for x in found)


@pytest.mark.parametrize("on_card", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("halves", [False, True])
def test_half_precision_error_is_at_most_that_with_logits(dtype, halves, on_card):
    *tensors, targets = samples(96, 64, 500, True, torch.float32)
    stored = [x.to(dtype) if halves else x for x in tensors]
    truth = with_gradients(plain(targets), *(x.to(dtype).double() for x in tensors), factor=0.01)

    def head(hidden, weight, bias):  # as under autocast, or with half weights
        scores = linear(hidden.to(dtype), weight.to(dtype), bias.to(dtype))
        return cross_entropy(scores.float(), targets, ignore_index=-100, reduction="sum")

    theirs = with_gradients(head, *stored, factor=0.01)
    ours = with_gradients(fused(targets, 7, dtype=dtype, on_card=on_card), *stored, factor=0.01)
    assert ours[0].dtype == torch.float32
    for mine, other, exact in zip(ours, theirs, truth, strict=True):
        assert mine.dtype == other.dtype
        assert distance(mine, exact) <= 1.1 * distance(other, exact) + 1e-6


def test_sums_of_many_tokens_stay_within_fp16():
    hidden, weight = torch.full((4096, 4), 40.0), torch.zeros(2, 4)
    _, _, gradient = with_gradients(
        lambda h, w: linear_cross_entropy(h, w, None, torch.ones(4096).long(), chunks=1, dtype=torch.float16, on_card=True),
        hidden,
        weight,
    )
    torch.testing.assert_close(gradient, torch.tensor([[81920.0], [-81920.0]]).expand(2, 4))


def test_frozen_weights_get_no_gradient():
    hidden, weight, bias, targets = samples(12, 8, 30, True, torch.float32)
    options = {"chunks": 3, "dtype": torch.float32, "on_card": False}
    _, of_hidden, of_weight, of_bias = chunked_cross_entropy(
        hidden, weight, bias, targets, needs_grad=(True, False, False), **options
    )
    assert (of_weight, of_bias) == (None, None)
    leaf = hidden.clone().requires_grad_()
    linear_cross_entropy(leaf, weight, bias, targets, chunks=3).backward()
    assert torch.equal(leaf.grad, of_hidden)
    assert weight.grad is None


@pytest.mark.parametrize(
    ("config", "tables", "tolerance"),
    [
        (PHI, {"optimizer": {}, "checkpointing": {}}, 1e-5),
        pytest.param(TINY_LLAMA, LORA, 1e-5, marks=DAILY),
        (GPT2, BF16, 1e-4),
        (GEMMA, LORA | O2, 1e-4),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) and "model_type" not in value else None,
)
def test_run_with_fused_loss_matches_the_run_without(config, tables, tolerance, tmp_path):
    job = tiny_job(tmp_path / "data", "causal-lm", config=config, max_steps=3)
    ours = train_tiny(plan_for(tiny_profile(**tables, fused_loss={}), job), tmp_path / "with")
    theirs = train_tiny(plan_for(tiny_profile(**tables), job), tmp_path / "without")
    assert ours.losses == pytest.approx(theirs.losses, rel=tolerance)
    eval_losses = [logged(tmp_path / name / "run", "eval_loss") for name in ("with", "without")]
    assert eval_losses[0]
    assert eval_losses[0] == pytest.approx(eval_losses[1], rel=tolerance)
    assert "forward" not in vars(ours.run.inner_model.get_output_embeddings())
    evidence = next(evidence for entry, evidence in ours.found if entry.name == "fused_loss")
    assert evidence.status == "active", evidence.seen
    first, second = (load_file(tmp_path / name / "run/final/model.safetensors") for name in ("with", "without"))
    assert {name: x.dtype for name, x in first.items()} == {name: x.dtype for name, x in second.items()}
    # Adam turns the rounding noise of gradients near 0 into full steps
    assert relative_error(first, second) <= (1e-4 if tolerance < 1e-4 else 3e-2)


def attached(model, **options):
    """The plugin's recipe on `model`, as hwopt.build applies it."""
    plugin, recipe = FusedLoss(FusedLoss.Options(backend="torch", **options)), Recipe()
    plugin.apply(recipe, Context(CPU, {}, None, None))
    run = SimpleNamespace(
        recipe=recipe, loss=recipe.loss, inner_model=recipe.model_steps[0](model, SimpleNamespace(recipe=recipe))
    )
    return plugin, run


def tiny(config):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(load_config(None, config))


@pytest.mark.parametrize(
    ("ran", "status"),
    [
        ({"FusedLinearCrossEntropy": 2, "aten::scatter_add_": 20}, "active"),
        ({"FusedLinearCrossEntropy": 2, "aten::cross_entropy_loss": 1}, "inactive"),
        ({"FusedLinearCrossEntropy": 1}, "inactive"),  # one micro-batch used another loss
        ({}, "unknown"),
    ],
)
def test_evidence_counts_fused_and_whole_losses(ran, status):
    plugin, run = attached(tiny(TINY_LLAMA), chunks=10)
    run.last_step_batch, run.observation = SimpleNamespace(sizes=[(4, 32), (4, 20)]), Observation(operators=ran)
    evidence = verify(plugin, run)
    assert evidence.status == status
    assert status != "active" or "128 tokens in 10 chunks, so logits of 13 tokens at once" in evidence.seen


def test_model_that_bypasses_its_output_layer_is_refused():
    _, run = attached(tiny(TINY_LLAMA), chunks=2)
    with pytest.raises(PluginError, match="returns 300 values per token, but its output layer expects 32"):
        run.loss(SimpleNamespace(logits=torch.zeros(1, 4, 300)), torch.zeros(1, 4, dtype=torch.long))


def context(hardware=CPU, software=(), kind="causal-lm", **facts):
    known = ModelFacts("tiny", "llama", "LlamaForCausalLM", 10_000, 2, 32, 300, 64, True, True, True, True, 0.0)
    job = SimpleNamespace(task=TaskOptions(kind=kind))
    return Context(hardware, dict.fromkeys(software, "0.8.5"), ModelFacts(**{**vars(known), **facts}), job)


def decided(*args, options=None, **more):
    return FusedLoss(FusedLoss.Options(**(options or {}))).probe(context(*args, **more))


@pytest.mark.parametrize(
    ("hardware", "software", "asked", "kind", "chosen", "why"),
    [
        (CPU, ["liger-kernel"], "auto", "apply", ("torch", 10), ""),
        (P100, ["liger-kernel"], "liger", "fallback", ("torch", 10), "7.0 (Triton needs Volta), found compute capability 6.0"),
        (T4, [], "liger", "fallback", ("torch", 10), "pip install 'hwopt[kernels]'"),
        (T4, ["liger-kernel"], "auto", "apply", ("liger", "auto"), "0.8.5"),
        (T4, ["liger-kernel"], "torch", "apply", ("torch", 10), ""),
    ],
)
def test_backend_is_chosen_by_hardware_and_software(hardware, software, asked, kind, chosen, why):
    decision = decided(hardware, software, options={"backend": asked})
    assert (decision.kind, decision.options[0].backend, decision.options[0].chunks) == (kind, *chosen)
    assert why in decision.reason


@pytest.mark.parametrize("changes", [{"kind": "text-classification"}, {"logit_transform": "its logits are changed"}])
def test_unsupported_task_or_logit_transform_is_skipped(changes):
    decision = decided(**changes)
    assert (decision.kind, next(iter(changes.values())) in decision.reason) == ("skip", True)
    assert FusedLoss.alternatives(None, context(**changes)) == []


LLAMA2 = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "vocab_size": 32_000}  # 7B
LLAMA3 = {"model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "vocab_size": 128_256}  # 3.2 1B
NO_CUT = "[plugins.length_batching]\nenabled = false"  # refused for mixtures of experts
CARD = described("RTX 4090", (8, 9), 24.0)


@pytest.mark.parametrize(
    ("config", "job", "own", "why"),
    [
        (LLAMA3, "", "", ""),
        (LLAMA2, "", "", "about 6.7% of a token's activations, less than least_share = 0.1"),
        (LLAMA2, "", "[plugins.fused_loss]", ""),
        (LLAMA2, "", "[plugins.fused_loss]\nleast_share = 0.2", "less than least_share = 0.2"),
        (LLAMA3, "label_smoothing = 0.1", "", "task.label_smoothing changes the loss"),
        (
            LLAMA3 | {"model_type": "mixtral", "router_aux_loss_coef": 0.02, "num_local_experts": 2, "num_hidden_layers": 1},
            "",
            NO_CUT,
            "load-balancing loss",
        ),
        (LLAMA3, "", '[plugins.adapter]\ntarget_modules = ["lm_head"]', "'adapter' (own.toml:4): the fused loss needs"),
        (LLAMA3, "", '[plugins.adapter]\nmodules_to_save = ["lm_head"]', "the adapter trains this one"),
        (LLAMA3, "", "[plugins.fsdp]", "needs the weight of the output layer"),
        (LLAMA3, "", "[plugins.zero]\nstage = 3", "needs the weight of the output layer"),
    ],
)
def test_profile_turns_it_on_for_large_logits_and_gives_way(config, job, own, why, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own.toml").write_text(f'name = "own"\nextends = "rtx4090_24gb"\n\n{own}\n')
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 64}
    task = tomllib.loads(f'kind = "causal-lm"\n{job}')
    data = {"model": {"config": sizes | config}, "task": task, "data": {"train": "t.txt"}}
    ranks = 2 if "fsdp" in own or "zero" in own else 1
    plan = plan_for(Inputs().profile("own.toml"), make_job(Document("a job", data)), hardware=CARD, world_size=ranks)
    entry = next(entry for entry in plan.entries if entry.name == "fused_loss")
    assert (entry.decision == "skip") == bool(why), entry.reason
    assert why in entry.reason
    assert (plan.recipe.loss is None) == bool(why)


def test_strict_accepts_what_gives_way():
    job = make_job(Document("a job", {"model": {"config": TINY_BERT}, "data": {"train": "t.csv"}}))
    assert plan_for(Inputs().profile("rtx4090_24gb"), job, hardware=CARD, strict=True).recipe.loss is None


@pytest.mark.parametrize(
    ("config", "seen"),
    [
        (SIZES | {"model_type": "gemma2", "num_key_value_heads": 1, "head_dim": 16}, "final_logit_softcapping = 30.0"),
        (SIZES | {"model_type": "cohere"}, "logit_scale = 0.0625"),
        (GEMMA | {"final_logit_softcapping": 20.0}, "final_logit_softcapping = 20.0"),
        (SIZES | {"model_type": "biogpt"}, "are unknown"),
        (GEMMA, None),
        (SIZES | {"model_type": "mixtral", "num_key_value_heads": 2, "num_local_experts": 4}, None),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_logit_transforms_of_models_are_found(config, seen, tmp_path):
    facts = [model_facts(load_config(None, config), task_facts("causal-lm"), "tiny", tmp_path) for _ in range(2)]
    assert facts[0] == facts[1], "the second one is from the cache"
    if seen is None:
        assert facts[0].logit_transform is None
    else:
        assert seen in facts[0].logit_transform


def loss_of_whole_logits(patch):
    from hwopt_plugins.fused_loss import cross_entropy as fused

    def plain(hidden, weight, bias, targets, **_):
        return cross_entropy(linear(hidden, weight, bias).float(), targets, reduction="sum")

    patch.setattr(fused, "linear_cross_entropy", plain)


def some_whole_logits(patch, chosen):
    """Every second micro-batch takes whole logits, or every chosen one."""
    from hwopt_plugins.fused_loss import cross_entropy as fused

    numbers, real = count(), fused.linear_cross_entropy

    def loss(hidden, weight, bias, targets, **options):
        if chosen(next(numbers) % 2):
            return cross_entropy(linear(hidden, weight, bias).float(), targets, reduction="sum")
        return real(hidden, weight, bias, targets, **options)

    patch.setattr(fused, "linear_cross_entropy", loss)


CASES = Cases(
    invalid=(({"backend": "liger", "chunks": 4}, "chunks = 4 needs backend"),),
    kind="causal-lm",
    writes=frozenset({"model_steps", "loss", "final_steps"}),
    conflicts=(
        Refused("adapter", '[plugins.fused_loss]\n[plugins.adapter]\ntarget_modules = ["lm_head"]'),
        Refused("zero", '[plugins.fused_loss]\n[plugins.zero]\nstage = 3\noffload = "none"'),
        Refused("fsdp", "[plugins.fused_loss]\n[plugins.fsdp]", on_card=True),
    ),
    mutations=(Mutation("the loss takes whole logits", loss_of_whole_logits, "on whole logits"),),
    parts=(Part("whole logits in some micro-batches", some_whole_logits),),
)
