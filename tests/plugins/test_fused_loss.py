"""The fused loss equals the loss with logits in value, gradients and whole runs, and logits are never materialized."""

import math
import sys
import weakref
from types import ModuleType, SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plugin_cases import Cases, Mutation, Refused
from pydantic import ValidationError
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy, linear
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from hwopt.config.task_kinds import task_facts
from hwopt.errors import PluginError
from hwopt.hardware.device import described
from hwopt.memory.forecast.measured import measure_peak
from hwopt.memory.trace.dry_run import Shape
from hwopt.memory.trace.tracer import trace_plan
from hwopt.model.config import load_config
from hwopt.model.facts import ModelFacts, model_facts
from hwopt.plugin import Context, Observation, Recipe, verify
from hwopt.testing import TINY_LLAMA, plan_for, tiny_job, tiny_profile, train_tiny
from hwopt_plugins.fused_loss import FusedLoss
from hwopt_plugins.fused_loss.cross_entropy import chunked_cross_entropy, liger_cross_entropy, linear_cross_entropy

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
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        linear_cross_entropy(leaf, weight, None, targets, chunks=3).backward()
    counts = {event.key: event.count for event in profiler.key_averages()}
    assert sum(counts.get(name, 0) for name in ("aten::mm", "aten::addmm", "aten::addmm_")) == 6, "two products a chunk"


def test_liger_is_called_by_its_public_signature(monkeypatch):
    """The call matches liger's public signature. Its kernels need a GPU (tests/gpu)."""
    asked = {}

    class LigerFusedLinearCrossEntropyLoss:
        def __init__(self, **options):
            asked.update(options)

        def __call__(self, lin_weight, _input, target, bias=None):
            return plain(target)(_input, lin_weight, bias)

    module = ModuleType("liger_kernel.transformers")
    module.LigerFusedLinearCrossEntropyLoss = LigerFusedLinearCrossEntropyLoss
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", module)
    *tensors, targets = samples(20, 8, 30, True, torch.float32)
    found = with_gradients(lambda *x: liger_cross_entropy(*x, targets, dtype=torch.float32), *tensors)
    for ours, theirs in zip(found, with_gradients(plain(targets), *tensors), strict=True):
        assert distance(ours, theirs) <= 1e-6
    assert asked == {"ignore_index": -100, "reduction": "sum", "accum_dtype": torch.float32}


def job_of(folder, config=TINY_LLAMA, **training):
    return tiny_job(folder, "causal-lm", config=config, **training)


def both(folder, config=TINY_LLAMA, options=None, training=None, **tables):
    """A run with the fused loss and one without."""
    job = job_of(folder / "data", config, **(training or {}))
    profiles = {"with": tiny_profile(**tables, fused_loss=options or {}), "without": tiny_profile(**tables)}
    return [train_tiny(plan_for(profile, job), folder / name) for name, profile in profiles.items()]


def eval_losses(recorder):
    return [row["eval_loss"] for row in recorder.rows if "eval_loss" in row]


def evidence_of(recorder):
    return next(evidence for entry, evidence in recorder.found if entry.name == "fused_loss")


@pytest.mark.parametrize(
    ("config", "tables", "tolerance"),
    [
        (PHI, {"optimizer": {}, "checkpointing": {}}, 1e-5),
        (TINY_LLAMA, LORA, 1e-5),
        (GPT2, BF16, 1e-4),
        (GEMMA, LORA | O2, 1e-4),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) and "model_type" not in value else None,
)
def test_run_with_fused_loss_matches_the_run_without(config, tables, tolerance, tmp_path):
    ours, theirs = both(tmp_path, config, **tables, training={"max_steps": 5})
    assert ours.losses == pytest.approx(theirs.losses, rel=tolerance)
    assert eval_losses(ours) == pytest.approx(eval_losses(theirs), rel=tolerance)
    assert eval_losses(ours)
    assert evidence_of(ours).status == "active", evidence_of(ours).seen
    folders = [tmp_path / name / "run/final" for name in ("with", "without")]
    first, second = (load_file(folder / "model.safetensors") for folder in folders)
    assert {name: x.dtype for name, x in first.items()} == {name: x.dtype for name, x in second.items()}
    # Adam turns the rounding noise of gradients near 0 into full steps
    apart = math.sqrt(sum(float((first[name] - second[name]).square().sum()) for name in first))
    assert apart <= (1e-4 if tolerance < 1e-4 else 3e-2) * math.sqrt(sum(float(x.square().sum()) for x in second.values()))
    models = [AutoModelForCausalLM.from_pretrained(folder).eval() for folder in folders]
    ids = torch.arange(1, 13)[None]
    with torch.no_grad():
        logits = [model(input_ids=ids).logits for model in models]
    assert logits[0].shape == (1, 12, 300), "the output layer is restored"
    torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=1e-3 if tolerance < 1e-4 else 3e-2)


def test_checkpoints_hold_the_whole_model(tmp_path):
    ours, _ = both(tmp_path, GPT2, training={"max_steps": 2, "save_steps": 1})
    states = [load_file(tmp_path / name / "run/checkpoint-1/model.safetensors") for name in ("with", "without")]
    assert list(states[0]) == list(states[1])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "with/run/checkpoint-1")
    assert model(input_ids=torch.zeros(1, 3, dtype=torch.long)).logits.shape == (1, 3, 300)
    assert "forward" not in vars(ours.run.inner_model.get_output_embeddings())


def test_masked_prompts_work_with_length_batching(tmp_path):
    """Masked prompts, with more chunks than some micro-batches have tokens."""
    job = job_of(tmp_path / "data")
    data = job.job.data.model_copy(update={"prompt": "label", "completion": "text"})
    object.__setattr__(job.job, "data", data)
    plans = [plan_for(tiny_profile(length_batching={}, **tables), job) for tables in ({"fused_loss": {"chunks": 200}}, {})]
    ours, theirs = (train_tiny(plan, tmp_path / str(number)) for number, plan in enumerate(plans))
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)
    assert eval_losses(ours) == pytest.approx(eval_losses(theirs), rel=1e-5)


class Widest(TorchDispatchMode):
    """Records the largest number of rows of a tensor with the width of the vocabulary."""

    def __init__(self, words):
        super().__init__()
        self.words, self.rows = words, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.ndim > 1 and x.shape[-1] == self.words:
                self.rows = max(self.rows, x.numel() // self.words)
        return out


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


def test_logits_of_a_micro_batch_are_never_materialized():
    ids = torch.randint(0, 300, (8, 62))
    with Widest(300) as whole:
        cross_entropy(tiny(TINY_LLAMA)(input_ids=ids).logits.flatten(0, 1), ids.flatten()).backward()
    assert whole.rows == 496
    _, run = attached(tiny(TINY_LLAMA), chunks=10)
    with Widest(300) as chunked:
        loss, count = run.loss(run.inner_model(input_ids=ids), ids)
        loss.backward()
    assert chunked.rows == 50
    assert int(count) == 496


def test_evidence_counts_fused_and_whole_losses():
    plugin, run = attached(tiny(TINY_LLAMA), chunks=10)
    run.last_step_batch = SimpleNamespace(sizes=[(4, 32), (4, 20)])
    ran = {"FusedLinearCrossEntropy": 2, "aten::scatter_add_": 20}
    run.observation = Observation(operators=ran)
    evidence = verify(plugin, run)
    assert evidence.status == "active"
    assert "128 tokens in 10 chunks, so logits of 13 tokens at once" in evidence.seen
    run.observation = Observation(operators={"LigerFusedLinearCrossEntropyFunction": 2})
    assert "liger chose" in verify(plugin, run).seen
    run.observation = Observation(operators=ran | {"aten::cross_entropy_loss": 1})
    assert verify(plugin, run).status == "inactive", "a cross-entropy on whole logits also ran"
    run.observation = Observation(operators={"FusedLinearCrossEntropy": 1})
    assert verify(plugin, run).status == "inactive", "one micro-batch used another loss"
    run.observation = Observation()
    assert verify(plugin, run).status == "unknown"
    run.recipe.final_steps[0](run.inner_model, run)
    assert verify(plugin, run).status == "inactive"
    run.loss = cross_entropy
    assert verify(plugin, run).status == "inactive"


@pytest.mark.parametrize("targets", [("q_proj", "lm_head"), ("lm_head",)])
def test_adapter_on_the_output_layer_is_refused(targets, tmp_path):
    tables = {"adapter": {"always": True, "r": 4, "target_modules": list(targets)}, "fused_loss": {}}
    with pytest.raises(PluginError, match=r"PeftModelForCausalLM is a Linear of peft.*plugins\.adapter\.target_modules"):
        train_tiny(plan_for(tiny_profile(**tables), job_of(tmp_path / "data")), tmp_path)


def test_model_that_bypasses_its_output_layer_is_refused():
    _, run = attached(tiny(TINY_LLAMA), chunks=2)
    with pytest.raises(PluginError, match="returns 300 values per token, but its output layer expects 32"):
        run.loss(SimpleNamespace(logits=torch.zeros(1, 4, 300)), torch.zeros(1, 4, dtype=torch.long))


def context(hardware=CPU, software=(), kind="causal-lm", **facts):
    known = ModelFacts("tiny", "llama", "LlamaForCausalLM", 10_000, 2, 32, 300, 64, True, True, True, True, 0.0)
    job = SimpleNamespace(task=SimpleNamespace(kind=kind))
    return Context(hardware, dict.fromkeys(software, "0.8.5"), ModelFacts(**{**vars(known), **facts}), job)


def decided(*args, options=None, **more):
    return FusedLoss(FusedLoss.Options(**(options or {}))).probe(context(*args, **more))


def test_backend_is_chosen_by_hardware_and_software():
    for hardware, software in ((CPU, ["liger-kernel"]), (T4, []), (P100, ["liger-kernel"])):
        auto, asked = decided(hardware, software), decided(hardware, software, options={"backend": "liger"})
        assert (auto.kind, auto.options[0].backend, auto.options[0].chunks) == ("apply", "torch", 10)
        assert (asked.kind, asked.options[0].backend) == ("fallback", "torch")
    assert "needs compute capability 7.0, found 6.0" in decided(P100, ["liger-kernel"], options={"backend": "liger"}).reason
    assert "pip install 'hwopt[kernels]'" in decided(T4, options={"backend": "liger"}).reason
    liger = decided(T4, ["liger-kernel"])
    assert (liger.kind, liger.options[0].backend, liger.options[0].chunks) == ("apply", "liger", "auto")
    assert "0.8.5" in liger.reason
    assert decided(T4, ["liger-kernel"], options={"backend": "liger"}).kind == "apply"
    assert decided(T4, ["liger-kernel"], options={"backend": "torch"}).options[0].backend == "torch"
    assert decided(T4, ["liger-kernel"], options={"chunks": 4}).options[0] == FusedLoss.Options(backend="torch", chunks=4)
    assert decided(options={"backend": "torch", "chunks": 4}).kind == "apply"
    assert decided(vocab_size=262_144).options[0].chunks == 16
    assert decided(vocab_size=10).options[0].chunks == 1


def test_unsupported_task_or_logit_transform_is_skipped():
    assert "text-classification" in decided(kind="text-classification").reason
    assert decided(kind="text-classification").kind == "skip"
    capped = decided(logit_transform="its logits are changed")
    assert (capped.kind, capped.reason) == (
        "skip",
        "LlamaForCausalLM is not supported: its logits are changed",
    )
    assert FusedLoss.alternatives(None, context(kind="text-classification")) == []
    assert FusedLoss.alternatives(None, context(logit_transform="its logits are changed")) == []
    assert FusedLoss.alternatives(FusedLoss.Options(), context()) == []
    (scale,) = FusedLoss.alternatives(None, context())
    assert [choice.changes for choice in scale.with_less_memory] == [{}]


@pytest.mark.parametrize(
    ("config", "seen"),
    [
        (SIZES | {"model_type": "gemma2", "num_key_value_heads": 1, "head_dim": 16}, "final_logit_softcapping = 30.0"),
        (SIZES | {"model_type": "cohere"}, "logit_scale = 0.0625"),
        (SIZES | {"model_type": "granite", "logits_scaling": 8.0}, "logits_scaling = 8.0"),
        (GEMMA | {"final_logit_softcapping": 20.0}, "final_logit_softcapping = 20.0"),
        (SIZES | {"model_type": "biogpt"}, "are unknown"),
        (GEMMA, None),
        (TINY_LLAMA, None),
        (GPT2, None),
        (PHI, None),
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


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tables", [O2, LORA | BF16], ids=["all", "lora"])
def test_planner_predicts_the_saved_memory(tables, tmp_path):
    config = TINY_LLAMA | {"vocab_size": 20_000}
    job, peaks = job_of(tmp_path / "data", config), []
    for chosen in ({"fused_loss": {}}, {}):
        plan = plan_for(tiny_profile(**tables, **chosen), job)
        trace = trace_plan(plan, 64, 2)
        for what, scaled in (("train", trace.train), ("eval", trace.eval)):
            predicted = scaled.at(16, 64).peak().bytes
            # oneDNN copies a matrix into the layout of the CPU's AMX units; the trace, of any device, has no such copy
            with torch.backends.mkldnn.flags(enabled=False):
                # the profiler sometimes misses a release, so the smaller of two measurements counts
                real = min(measure_peak(plan, Shape(16, 64), 2, what) for _ in range(2))
            assert predicted == pytest.approx(real, rel=0.01), what
            peaks.append(predicted)
    with_it, without = peaks[:2], peaks[2:]
    assert with_it[0] < 0.5 * without[0]
    assert with_it[1] < 0.5 * without[1]


def test_message_about_chunks_names_the_option_to_omit():
    with pytest.raises(ValidationError, match="liger chooses its own. Remove chunks, or the backend"):
        FusedLoss.Options.model_validate_json('{"backend": "liger", "chunks": 4}')


def loss_of_whole_logits(patch):
    import hwopt_plugins.fused_loss as fused_loss

    def plain(hidden, weight, bias, targets, **_):
        return cross_entropy(linear(hidden, weight, bias).float(), targets, reduction="sum")

    patch.setattr(fused_loss, "linear_cross_entropy", plain)


def head_computes_logits(patch):
    """The output layer keeps its own forward method: assigning an attribute of that name has no effect."""
    import hwopt_plugins.fused_loss as fused_loss

    def loss(self, outputs, targets):
        flat = cross_entropy(outputs.logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
        return flat, (targets != -100).sum()

    def attach(self, model, run):
        layer = model.get_output_embeddings()
        vars(layer)["forward"] = layer.forward
        self.layer = weakref.ref(layer)
        return model

    patch.setattr(fused_loss.FusedHead, "attach", attach)
    patch.setattr(fused_loss.FusedHead, "loss", loss)


CASES = Cases(
    invalid=(({"backend": "liger", "chunks": 4}, "chunks = 4 needs backend"),),
    kind="causal-lm",
    writes=frozenset({"model_steps", "loss", "final_steps"}),
    conflicts=(
        Refused("zero", '[plugins.fused_loss]\n[plugins.zero]\nstage = 3\noffload = "none"'),
        Refused("fsdp", "[plugins.fused_loss]\n[plugins.fsdp]", on_card=True),
    ),
    mutations=(
        Mutation("the loss takes whole logits", loss_of_whole_logits, "on whole logits"),
        Mutation("the output layer computes logits", head_computes_logits, "still computes the logits"),
    ),
)
