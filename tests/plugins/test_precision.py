"""The dtype on each machine, O2 with masters compared with fp32 training, and lossless export and restore."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from plugin_cases import Cases, Mutation, Part, Refused
from safetensors.torch import load_file
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForSequenceClassification

from hwopt import api
from hwopt.config.aliases import instead_of
from hwopt.distributed.engine import Engine
from hwopt.errors import InputError
from hwopt.hardware.detect import detect
from hwopt.hardware.device import described
from hwopt.plugin import Context, Observation, Recipe, verify
from hwopt.testing import TINY_LLAMA, plan_for, rewound, saved_bits, tiny_job, tiny_profile, train_tiny
from hwopt_plugins.adapter import Adapter, add_adapter, save_and_merge
from hwopt_plugins.precision import Precision
from hwopt_plugins.precision.frozen import cast_frozen, is_norm, to_fp32

T4, V100 = described("T4", (7, 5), 16.0), described("V100", (7, 0), 16.0)
P100 = described("P100", (6, 0), 16.0)
AMPERE = [described("RTX 3070", (8, 6), 8.0), described("A100", (8, 0), 40.0), described("H100", (9, 0), 80.0)]
CPU = described("CPU", None, 32.0)
AMX = replace(CPU, cpu_features=("amx_bf16", "avx512_bf16"))
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 100}


def decided(hardware, dtype="auto", **options):
    return Precision(Precision.Options(dtype=dtype, **options)).probe(Context(hardware, {}, None, None))


def written(hardware, **options):
    recipe = Recipe()
    Precision(Precision.Options(**options)).apply(recipe, Context(hardware, {}, None, None))
    return recipe


@pytest.mark.parametrize(
    ("hardware", "dtype"),
    [(T4, "fp16"), (V100, "fp16"), (P100, "fp32"), *((card, "bf16") for card in AMPERE), (CPU, "fp32"), (AMX, "bf16")],
)
def test_auto_chooses_the_dtype_of_the_hardware(hardware, dtype):
    decision = decided(hardware)
    assert (decision.kind, decision.options[0].dtype) == ("apply", dtype)


def test_fp16_on_a_cpu_never_stays_fp16():
    for hardware, takes in ((CPU, "fp32"), (AMX, "bf16")):
        decision = decided(hardware, "fp16", level="O2")
        assert (decision.kind, decision.options[0].dtype) == ("fallback", takes)
        assert decision.options[0].level == ("O1" if takes == "fp32" else "O2")


def test_emulated_bf16_falls_back():
    decision = decided(T4, "bf16", level="O2")
    assert (decision.kind, decision.options[0].dtype, decision.options[0].level) == ("fallback", "fp16", "O2")
    assert "needs compute capability 8.0" in decision.reason
    assert "7.5" in decision.reason
    assert decided(CPU, "bf16").options[0].dtype == "fp32"
    assert decided(P100, "fp16").options[0].dtype == "fp32"


def test_settings_of_each_level_are_written_to_the_recipe():
    o1 = written(T4, dtype="fp16")
    assert o1.accelerator["mixed_precision"] == "fp16"
    assert o1.batch == {"pad_to_multiple_of": 8}
    assert (o1.model_kwargs["dtype"], o1.scaler, len(o1.model_steps)) == ("float32", None, 1)
    o2 = written(CPU, dtype="bf16", level="O2")
    assert o2.accelerator["mixed_precision"] == "no"
    assert (dict(o2.batch), o2.scaler) == ({}, None)
    assert len(o2.model_steps) == len(o2.optimizer_wraps) == 1
    assert o2.masters is not None
    assert written(T4, dtype="fp16", level="O2").scaler is not None
    full = written(T4, dtype="fp32", level="O2")
    assert (full.accelerator["mixed_precision"], full.model_steps, dict(full.batch)) == ("no", [], {})


def bert():
    torch.manual_seed(0)
    config = BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return BertForSequenceClassification._from_config(config, attn_implementation="sdpa")


def batches(steps):
    generator = torch.Generator().manual_seed(2)
    for _ in range(steps):
        ids = torch.randint(1, 100, (8, 8), generator=generator)
        yield ids, (ids[:, 1] > 50).long()


def build(recipe, model):
    """Apply the recipe to the model as hwopt.training.build does, limited to what this plugin uses."""
    for step in recipe.model_steps:
        model = step(model, None)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for wrap in recipe.optimizer_wraps:
        optimizer = wrap(optimizer, None)
    scaler = recipe.scaler() if recipe.scaler else None
    run = SimpleNamespace(inner_model=model, optimizer=optimizer, scaler=scaler, losses=[], recipe=recipe)
    run.parameter_names = [name for name, p in model.named_parameters() if p.requires_grad]
    run.device, run.scheduler, run.training = torch.device("cpu"), None, SimpleNamespace(max_grad_norm=1.0)
    run.engine = Engine(run)
    return run


def train(recipe, model, steps=30):
    """Train like the loop: backward, unscale, clip, step, copy masters to the weights."""
    run = build(recipe, model)
    parameters = [p for group in run.optimizer.param_groups for p in group["params"]]
    for ids, labels in batches(steps):
        loss = torch.nn.functional.cross_entropy(model.train()(input_ids=ids).logits.float(), labels)
        (run.scaler.scale(loss) if run.scaler else loss).backward()
        if recipe.masters:
            recipe.masters.collect()
        if run.scaler:
            run.scaler.unscale_(run.optimizer)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        if run.scaler:
            run.scaler.step(run.optimizer)
            run.scaler.update()
        else:
            run.optimizer.step()
        if recipe.masters:
            recipe.masters.publish()
        run.optimizer.zero_grad(set_to_none=True)
        run.losses.append(loss.item())
    return run


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def distance(a, b):
    return sum((a[name].float() - b[name].float()).square().sum() for name in a) ** 0.5


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_o2_follows_fp32_training(dtype):
    start = weights(bert())
    full = train(written(CPU, dtype="fp32"), bert())
    half = train(written(CPU, dtype=dtype, level="O2"), bert())
    assert half.losses == pytest.approx(full.losses, abs=0.02)
    model = half.inner_model
    assert all(p.grad is None for p in model.parameters() if p.dtype != torch.float32), "half gradients are freed"
    masters = half.recipe.export_steps[0](model.state_dict(), half)
    assert all(value.dtype == torch.float32 for value in masters.values() if value.is_floating_point())
    moved = distance(weights(full.inner_model), start)
    assert distance(weights(full.inner_model), masters) < 0.25 * moved
    # the half weights are the rounded masters, and norms need no masters
    for module in model.modules():
        if is_norm(module):
            assert all(p.dtype == torch.float32 for p in module.parameters())
    for name, p in model.named_parameters():
        assert torch.equal(p, masters[name].to(p.dtype))


def test_masters_start_from_the_unrounded_weights():
    start, run = weights(bert()), build(written(CPU, dtype="bf16", level="O2"), bert())
    exported = run.recipe.export_steps[0](run.inner_model.state_dict(), run)
    assert all(torch.equal(exported[name], value) for name, value in start.items())


def test_final_model_is_fp32():
    run = train(written(CPU, dtype="bf16", level="O2"), bert(), steps=3)
    exported = run.recipe.export_steps[0](run.inner_model.state_dict(), run)
    final = run.recipe.final_steps[0](run.inner_model, run)
    assert all(torch.equal(value, exported[name]) for name, value in final.named_parameters())
    plain = bert()
    plain.load_state_dict(exported)
    ids = next(batches(1))[0]
    assert torch.equal(final.eval()(input_ids=ids).logits, plain.eval()(input_ids=ids).logits), "no hook casts any more"


def test_exported_weights_restore_the_masters():
    run = train(written(CPU, dtype="bf16", level="O2"), bert(), steps=3)
    exported = {name: value.clone() for name, value in run.recipe.export_steps[0](run.inner_model.state_dict(), run).items()}
    other = build(written(CPU, dtype="bf16", level="O2"), bert())
    other.inner_model.load_state_dict(exported)
    again = other.recipe.export_steps[0](other.inner_model.state_dict(), other)
    assert all(torch.equal(value, again[name]) for name, value in exported.items())
    assert all(torch.equal(p, exported[name].to(p.dtype)) for name, p in other.inner_model.named_parameters())


def test_overflow_does_not_change_the_masters():
    run = build(written(CPU, dtype="fp16", level="O2"), bert())
    before = run.recipe.export_steps[0](run.inner_model.state_dict(), run)
    before = {name: value.clone() for name, value in before.items()}
    ids, labels = next(batches(1))
    loss = torch.nn.functional.cross_entropy(run.inner_model(input_ids=ids).logits.float(), labels)
    (run.scaler.scale(loss) * 1e4).backward()
    run.recipe.masters.collect()
    run.scaler.unscale_(run.optimizer)
    run.scaler.step(run.optimizer)
    scale = run.scaler.get_scale()
    run.scaler.update()
    assert run.scaler.get_scale() < scale
    run.recipe.masters.publish()
    after = run.recipe.export_steps[0](run.inner_model.state_dict(), run)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_adapters_get_masters_and_merge_in_fp32(tmp_path):
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(LlamaConfig(**SIZES, pad_token_id=0, num_labels=2))
    model = add_adapter(model, options=Adapter.Options(kind="dora", r=4, lora_alpha=8), task="SEQ_CLS")
    recipe = Recipe()
    recipe.final_steps.append(save_and_merge)  # the adapter's export step comes first
    Precision(Precision.Options(dtype="bf16", level="O2")).apply(recipe, Context(CPU, {}, None, None))
    run = train(recipe, model, steps=5)
    stepped = [p for group in run.optimizer.param_groups for p in group["params"]]
    assert all(p.dtype == torch.float32 for p in stepped)
    assert all(p.dtype == torch.bfloat16 for name, p in model.named_parameters() if "lora_" in name)
    run.rank, run.extras = 0, tmp_path
    final = model
    for step in reversed(recipe.final_steps):
        final = step(final, run)
    assert type(final) is LlamaForSequenceClassification
    assert all(p.dtype == torch.float32 for p in final.parameters())


def with_adapter():
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(LlamaConfig(**SIZES, pad_token_id=0))
    return add_adapter(model, options=Adapter.Options(), task="SEQ_CLS")


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_frozen_weights_are_stored_in_half_precision_and_trained_ones_are_not(dtype):
    model = with_adapter()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model = cast_frozen(dtype, model)
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    in_fp32 = {name for name, p in model.named_parameters() if p.dtype == torch.float32}
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    others = {name for name in before if "norm" in name or "embed_tokens" in name}
    assert in_fp32 == trained | (others if dtype == "fp16" else set())
    model = to_fp32(model)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name] if name in in_fp32 else before[name].to(half).float()), name


def test_products_of_frozen_weights_keep_their_bits():
    ids = torch.arange(1, 25).reshape(3, 8)
    model = with_adapter()
    for layer in model.model.model.layers:  # only the linear layers
        cast_frozen("bf16", layer.self_attn)
        cast_frozen("bf16", layer.mlp)
    with torch.autocast("cpu", torch.bfloat16):
        cast, plain = model(ids).logits, with_adapter()(ids).logits
    assert torch.equal(cast, plain)


def test_run_with_an_adapter_stores_the_frozen_weights_in_half_precision(tmp_path, monkeypatch):
    tables = {"precision": {"dtype": "bf16"}, "adapter": {"always": True}}
    job = tiny_job(tmp_path, "causal-lm")
    plan = plan_for(tiny_profile(**tables), job)
    recorder = train_tiny(plan, tmp_path / "as_planned")
    assert {each.status for _, each in recorder.found} == {"active"}, recorder.found
    final = load_file(tmp_path / "as_planned" / "run" / "final" / "model.safetensors")
    assert {value.dtype for value in final.values()} == {torch.float32}
    no_half_weights(monkeypatch)
    recorder = train_tiny(plan, tmp_path / "in_fp32")
    found = next(each for plugin, each in recorder.found if plugin.name == "precision")
    assert found.status == "inactive"
    assert "frozen layers are stored in fp32: " in found.seen


@pytest.mark.parametrize("level", ["O2", "pure"])
def test_buffers_keep_their_bits(level):
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(LlamaConfig(**SIZES, pad_token_id=0))
    frequencies = model.model.rotary_emb.inv_freq.clone()
    run = build(written(CPU, dtype="bf16", level=level), model)
    assert run.inner_model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(run.inner_model.model.rotary_emb.inv_freq, frequencies)


def test_tied_weights_stay_tied():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=100, n_positions=16))
    run = build(written(CPU, dtype="bf16", level="O2"), model)
    assert model.lm_head.weight is model.transformer.wte.weight
    exported = run.recipe.export_steps[0](model.state_dict(), run)
    assert exported["lm_head.weight"].dtype == exported["transformer.wte.weight"].dtype == torch.float32


def test_pure_decisions():
    assert decided(AMPERE[0], level="pure").options[0].dtype == "bf16"
    on_t4 = decided(T4, level="pure")
    assert (on_t4.kind, on_t4.options[0].dtype, on_t4.options[0].level) == ("fallback", "fp16", "O2")
    assert "pure needs bf16: needs compute capability 8.0" in on_t4.reason
    assert decided(CPU, "bf16", level="pure").options[0].dtype == "fp32"


def test_pure_changes_the_method_and_the_other_levels_do_not():
    effects = {level: Precision(Precision.Options(dtype="bf16", level=level)).effect for level in ("O1", "O2", "pure")}
    assert effects == {"O1": "rounding", "O2": "rounding", "pure": "method"}
    assert Precision(Precision.Options(dtype="fp32", level="pure")).effect == "rounding"


def test_pure_follows_fp32_training_at_a_learning_rate_above_its_rounding():
    full = train(written(CPU, dtype="fp32"), bert())
    pure = train(written(CPU, dtype="bf16", level="pure"), bert())
    assert pure.losses == pytest.approx(full.losses, abs=0.05)


def plan_of_pure(folder, **tables):
    here = detect()
    hardware = replace(here, cpu_features=(*here.cpu_features, "avx512_bf16"))  # every CPU can compute in bf16
    tables = {"precision": {"dtype": "bf16", "level": "pure"}} | tables
    return plan_for(tiny_profile(**tables), tiny_job(folder, save_steps=2), hardware=hardware)


def test_pure_run_saves_bf16_and_resumes_with_the_same_bits(tmp_path):
    plan = plan_of_pure(tmp_path)
    recorder = train_tiny(plan, tmp_path)
    evidence = next(evidence for entry, evidence in recorder.found if entry.name == "precision")
    assert evidence.status == "active", evidence.seen
    assert "the optimizer steps on {'bfloat16'" in evidence.seen
    run = tmp_path / "run"
    final = load_file(run / "final" / "model.safetensors")
    assert {value.dtype for value in final.values() if value.is_floating_point()} == {torch.bfloat16}
    assert json.loads((run / "final" / "config.json").read_text())["dtype"] == "bfloat16"
    resumed = rewound(run, tmp_path / "again", 2)
    api.execute(plan, resumed, cache=tmp_path / "cache", resume=True)
    assert saved_bits(resumed / "final") == saved_bits(run / "final")


def test_resume_refuses_another_level_than_pure(tmp_path):
    train_tiny(plan_of_pure(tmp_path), tmp_path)
    resumed = rewound(tmp_path / "run", tmp_path / "again", 2)
    with pytest.raises(InputError, match=r"plugins\.precision"):
        api.execute(plan_of_pure(tmp_path, precision={"dtype": "bf16"}), resumed, cache=tmp_path / "cache", resume=True)


@pytest.mark.parametrize(("level", "expected"), [("O1", (4, 4, 8, 0)), ("O2", (2, 2, 8, 4)), ("pure", (2, 2, 4, 0))])
def test_bytes_per_parameter_of_each_level(level, expected, tmp_path):
    plan = plan_of_pure(tmp_path, precision={"dtype": "bf16", "level": level}, optimizer={"name": "adamw_torch"})
    spec = plan.memory_spec
    assert (spec.weight_bytes, spec.gradient_bytes, spec.state_bytes, spec.master_bytes) == expected


def observed(run, **matmuls):
    run.observation = Observation(matmul_dtypes={name.replace("_", "::"): count for name, count in matmuls.items()})
    return run


def test_evidence_reads_dtypes_of_weights_and_operators():
    o2 = Precision(Precision.Options(dtype="bf16", level="O2"))
    half, full = train(written(CPU, dtype="bf16", level="O2"), bert(), 1), train(written(CPU, dtype="fp32"), bert(), 1)
    assert verify(o2, observed(half, c10_BFloat16=40)).status == "active"
    pure = Precision(Precision.Options(dtype="bf16", level="pure"))
    assert verify(pure, observed(half, c10_BFloat16=40)).status == "inactive", "the optimizer steps on fp32 masters"
    assert verify(Precision(Precision.Options(dtype="bf16")), observed(full)).status == "unknown"
    fp16 = Precision(Precision.Options(dtype="fp16"))
    assert verify(fp16, observed(full, c10_Half=40)).status == "inactive", "no scaler"
    full.engine.scaler = torch.amp.GradScaler("cpu")
    assert "loss scale 65536" in verify(fp16, full).seen
    assert verify(fp16, full).status == "active"


def test_full_eval_needs_half_weights():
    assert decided(CPU, "fp16", level="O2", full_eval=True).options[0].full_eval is False


@pytest.mark.parametrize("word", ["fp16_full_eval", "bf16_full_eval"])
def test_words_of_the_trainer_for_half_evaluation_are_known(word):
    assert instead_of(word).startswith("plugins.precision.full_eval")


def test_evaluation_uses_the_masters():
    """With full_eval = false the fp32 masters are evaluated under autocast. Training then continues with the same bits."""
    recipe = written(CPU, dtype="bf16", level="O2")
    run = train(recipe, bert(), steps=3)
    run.device = torch.device("cpu")
    half = {name: p.detach().clone() for name, p in run.inner_model.named_parameters()}
    recipe.events.on_evaluate_begin(run)
    assert {p.dtype for p in run.inner_model.parameters()} == {torch.float32}
    assert torch.is_autocast_enabled("cpu")
    ids, _ = next(iter(batches(1)))
    with torch.no_grad():
        assert torch.isfinite(run.inner_model.eval()(input_ids=ids).logits).all()
    recipe.events.on_evaluate_end(run)
    assert not torch.is_autocast_enabled("cpu")
    for name, p in run.inner_model.named_parameters():
        assert p.dtype == half[name].dtype
        assert torch.equal(p, half[name])
    assert written(CPU, dtype="bf16", level="O2", full_eval=True).events.objects == []


def no_autocast(patch):
    import accelerate.accelerator

    def disabled(*_, **__):
        return torch.autocast("cpu", enabled=False)

    patch.setattr(accelerate.accelerator, "get_mixed_precision_context_manager", disabled)


def no_half_weights(patch):
    """`tensor.to(torch.bfloat16)` returns the tensor as it is."""
    real = torch.Tensor.to

    def to(self, *args, **kwargs):
        return self if args == (torch.bfloat16,) else real(self, *args, **kwargs)

    patch.setattr(torch.Tensor, "to", to)


def no_half_model(patch):
    """transformers also makes the model in fp32."""
    no_half_weights(patch)
    patch.setattr(torch, "set_default_dtype", lambda dtype: None)


def linear_in_fp32(patch, chosen):
    """Some linear layers compute in fp32, outside of autocast."""
    numbers, real = {}, nn.Linear.forward

    def forward(self, x):
        if not chosen(numbers.setdefault(id(self), len(numbers))):
            return real(self, x)
        with torch.autocast("cpu", enabled=False):
            return nn.functional.linear(x.float(), self.weight.float(), None if self.bias is None else self.bias.float())

    patch.setattr(nn.Linear, "forward", forward)


def linear_in_fp32_with_half_output(patch, chosen):
    """The same layers cast their output to bf16."""
    linear_in_fp32(patch, chosen)
    in_fp32 = nn.Linear.forward
    patch.setattr(nn.Linear, "forward", lambda self, x: in_fp32(self, x).to(torch.bfloat16))


ZERO_2, FSDP = "[plugins.zero]\nstage = 2", "[plugins.fsdp]"
PURE_TABLE = '[plugins.precision]\ndtype = "bf16"\nlevel = "pure"\n'
O2_TABLE = '[plugins.precision]\ndtype = "bf16"\nlevel = "O2"\n'
CASES = Cases(
    invalid=(
        ({"full_eval": True}, 'set level = "O2"'),
        ({"dtype": "fp16", "level": "pure"}, 'level = "pure" needs dtype = "bf16"'),
    ),
    options={"dtype": "bf16"},
    conflicts=(
        Refused("zero", O2_TABLE + ZERO_2),
        Refused("fsdp", O2_TABLE + FSDP, on_card=True),
        Refused("zero", PURE_TABLE + ZERO_2),
    ),
    mutations=(
        Mutation("autocast has no effect", no_autocast, "expected bf16_matmuls True", {"dtype": "bf16"}),
        Mutation("weights stay in fp32", no_half_weights, "expected half_weights True", {"dtype": "bf16", "level": "O2"}),
        Mutation("the model stays in fp32", no_half_model, "expected updated bfloat16", {"dtype": "bf16", "level": "pure"}),
    ),
    parts=(
        Part("linear layers in fp32", linear_in_fp32, {"dtype": "bf16"}),
        Part("linear layers in fp32, half output", linear_in_fp32_with_half_output, {"dtype": "bf16"}),
    ),
)


def test_layers_that_compute_in_fp32_are_named_with_both_counts(tmp_path, monkeypatch):
    job = tiny_job(tmp_path / "data", "causal-lm", config=TINY_LLAMA | {"num_hidden_layers": 4}, max_steps=1)
    plan = plan_for(tiny_profile(precision={"dtype": "bf16"}), job)
    linear_in_fp32(monkeypatch, lambda number: number in (1, 2, 3, 8))
    found = train_tiny(plan, tmp_path).found
    seen = next(evidence.seen for entry, evidence in found if entry.name == "precision")
    assert "4 of 29 linear layers computed in fp32: " in seen
    assert "model.layers.0.self_attn.k_proj, model.layers.0.self_attn.v_proj, model.layers.0.self_attn.o_proj and 1 more" in seen
