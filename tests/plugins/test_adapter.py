"""Real PEFT adapters: only adapter and head are trained, merging keeps the outputs, small models get no adapter."""

from collections import Counter
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from integration.forks import in_fork
from peft import PeftModel
from plugin_cases import Cases, Mutation, Part
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from hwopt.config.job_model import Model
from hwopt.errors import PluginError
from hwopt.hardware.device import described
from hwopt.model.facts import ModelFacts
from hwopt.planning.inputs import Inputs
from hwopt.plugin import Context, Observation, Recipe, verify
from hwopt.testing import TINY_LLAMA, plan_for, tiny_job, tiny_profile, train_tiny
from hwopt_plugins.adapter import (
    Adapter,
    add_adapter,
    classification_heads,
    tensors_with_moment,
)
from hwopt_plugins.adapter.adapted_layers import idle_adapters, layers_without_adapter

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 100}
IDS = torch.arange(1, 25).reshape(3, 8)

UNMATCHED = "ignore:The following (rank|alpha)_pattern keys did not match"
"""PEFT's own warning for experts."""


def context(kind="text-classification", parameters=1_000_000_000):
    facts = ModelFacts("gemma", "bert", "Bert", parameters, 2, 32, 100, 512, False, True, True, True, 0.0)
    job = SimpleNamespace(task=SimpleNamespace(kind=kind), model=Model(name="m"))
    return Context(described("T4", (7, 5), 16.0), {"peft": "1"}, facts, job)


def bert():
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(**SIZES))


def tagger():
    torch.manual_seed(0)
    return BertForTokenClassification(BertConfig(**SIZES))


def llama():
    torch.manual_seed(0)
    return LlamaForSequenceClassification(LlamaConfig(**SIZES, pad_token_id=0))


def classifier(build, kind):
    plugin, recipe = Adapter(Adapter.Options(kind=kind, r=4, lora_alpha=8)), Recipe()
    plugin.apply(recipe, context("token-classification" if build is tagger else "text-classification"))
    return plugin, recipe, recipe.model_steps[0](build(), None)


def trained(model, steps=3):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(steps):
        model.train()(input_ids=IDS).logits.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return run_of(model, optimizer)


def run_of(model, optimizer):
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    engine, nothing = SimpleNamespace(parameters=stepped), Observation()
    return SimpleNamespace(inner_model=model, optimizer=optimizer, rank=0, engine=engine, observation=nothing)


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize(("build", "heads"), [(bert, ["classifier"]), (llama, ["score"]), (tagger, ["classifier"])])
def test_only_adapter_and_head_train(build, heads, kind):
    assert classification_heads(build()) == heads
    plugin, _, model = classifier(build, kind)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    untouched = run_of(model, torch.optim.AdamW(model.parameters()))
    assert verify(plugin, untouched).status == "inactive", "no gradient yet"
    assert verify(plugin, trained(classifier(build, kind)[2], steps=1)).status == "active", "visible after one step"
    run = trained(model)
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed
    assert all("lora_" in name or "modules_to_save" in name for name in changed)
    for head in heads:
        assert any(f"{head}.modules_to_save" in name for name in changed)
    assert all(p.dtype == torch.float32 for p in model.parameters() if p.requires_grad)
    evidence = verify(plugin, run)
    assert evidence.status == "active", evidence.seen
    assert ("0 DoRA magnitudes" in evidence.seen) == (kind == "lora")


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_merged_model_equals_the_trained_model(tmp_path, kind):
    _, recipe, model = classifier(llama, kind)
    run = trained(model)
    run.extras = tmp_path
    with torch.no_grad():
        wanted = model.eval()(input_ids=IDS).logits
        merged = recipe.final_steps[0](model, run)
        found = merged.eval()(input_ids=IDS).logits
    assert type(merged) is LlamaForSequenceClassification
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert (tmp_path / "adapter/adapter_config.json").is_file()
    merged.save_pretrained(tmp_path / "whole")
    again = LlamaForSequenceClassification.from_pretrained(tmp_path / "whole").eval()
    torch.testing.assert_close(again(input_ids=IDS).logits, found)


GIVEN = {
    "use_rslora": True,
    "init_lora_weights": "pissa",
    "modules_to_save": ("embed_tokens",),
    "target_modules": ("q_proj",),
    "layers_to_transform": (1,),
}


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # of PEFT's from_pretrained
def test_options_reach_peft_and_its_saved_adapter_gives_the_trained_model(tmp_path):
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    original = deepcopy(model)
    recipe = Recipe()
    Adapter(Adapter.Options(r=4, **GIVEN)).apply(recipe, context("causal-lm"))
    model = recipe.model_steps[0](model, None)
    config = model.peft_config["default"]
    assert (config.use_rslora, config.init_lora_weights) == (True, "pissa")
    adapted = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name.partition("model.model.")[2].rpartition(".default")[0] for name in adapted} == {
        "model.embed_tokens.modules_to_save",
        "model.layers.1.self_attn.q_proj.lora_A",
        "model.layers.1.self_attn.q_proj.lora_B",
    }
    run = trained(model)
    run.extras = tmp_path
    wanted = model.eval()(input_ids=IDS).logits
    torch.testing.assert_close(recipe.final_steps[0](model, run).eval()(input_ids=IDS).logits, wanted)
    again = PeftModel.from_pretrained(original, tmp_path / "adapter").eval()
    torch.testing.assert_close(again(input_ids=IDS).logits, wanted)


def test_unknown_target_module_is_refused():
    recipe = Recipe()
    Adapter(Adapter.Options(target_modules=("query_key_value",))).apply(recipe, context())
    with pytest.raises(PluginError, match="query_key_value"):
        recipe.model_steps[0](llama(), None)


@pytest.mark.filterwarnings(UNMATCHED)
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "gpt_oss"])
@pytest.mark.parametrize("options", [Adapter.Options(kind="dora"), Adapter.Options(lora_dropout=0.1)], ids=["dora", "dropout"])
def test_experts_that_peft_adapts_get_lora_without_dropout(kind, options):
    config = AutoConfig.for_model(**{**TINY_LLAMA, **SIZES, "model_type": kind, "num_experts": 2, "num_local_experts": 2})
    model = AutoModelForCausalLM.from_config(config)
    facts = replace(context().model, model_type=kind, other_weights={"layers.*.mlp.experts.down_proj": 1})
    decision = Adapter(options).probe(replace(context(), model=facts))
    assert decision.kind == ("apply" if kind == "gpt_oss" else "fallback")
    add_adapter(model, options=next(iter(decision.options), options), task="CAUSAL_LM")


def test_small_models_get_an_adapter_only_with_always():
    decision = Adapter(Adapter.Options()).probe(context(parameters=22_700_000))
    assert decision.kind == "skip"
    assert "22.7 M" in decision.reason
    assert "500 M" in decision.reason
    assert Adapter(Adapter.Options(always=True)).probe(context(parameters=22_700_000)).kind == "apply"
    assert Adapter(Adapter.Options()).probe(context()).kind == "apply"


ASKED = "[plugins.adapter]\nr = 8\n"


@pytest.mark.parametrize("where", ["nowhere", "job", "--set", "own profile"])
def test_adapter_that_the_user_asks_for_is_not_skipped_by_size(where, tmp_path):
    """Otherwise all weights of a small model would be trained, at the adapter's learning rate."""
    (tmp_path / "own.toml").write_text(f'name = "own"\nextends = "rtx3090_24gb"\n{ASKED}')
    (tmp_path / "job.toml").write_text('[model]\nname = "m"\n[data]\ntrain = "d"\n' + (ASKED if where == "job" else ""))
    inputs = Inputs()
    profile = inputs.profile(
        str(tmp_path / "own.toml") if where == "own profile" else "rtx3090_24gb",
        ["plugins.adapter.r=8"] if where == "--set" else [],
        inputs.job(tmp_path / "job.toml", []),
    )
    table = profile.content.plugins["adapter"]
    decision = Adapter(Adapter.Options(**table)).probe(replace(context(parameters=22_700_000), chosen=profile.chosen))
    assert decision.kind == ("skip" if where == "nowhere" else "apply")


def test_evidence_names_other_weights_that_train():
    plugin, _, model = classifier(bert, "lora")
    run = trained(model)
    next(p for name, p in model.named_parameters() if "word_embeddings" in name).requires_grad_(True)
    evidence = verify(plugin, run)
    assert evidence.status == "inactive"
    assert "word_embeddings" in evidence.seen


def without_its_adapter(layer, model):
    model.bert.encoder.layer[0].attention.self.query = layer.base_layer


ENDS = {  # what ends the effect of the adapter of one layer
    "frozen": (lambda layer, model: layer.lora_B.requires_grad_(False), "1 adapters are not computed or do not train: "),
    "disabled": (lambda layer, model: layer.enable_adapters(False), "1 adapters are not computed or do not train: "),
    "merged": (lambda layer, model: layer.merge(), "1 adapters are not computed or do not train: "),
    "multiplied by 0": (lambda layer, model: layer.scaling.update(default=0.0), "expected scale 2.0, found 0.0 and 2.0"),
    "dropped out": (lambda layer, model: layer.lora_dropout.update({"default": torch.nn.Dropout(1.0)}), "found 0.0 and 1.0"),
    "removed": (without_its_adapter, "expected without_adapter 0, found 1"),
}


@pytest.mark.parametrize("end", ENDS)
def test_evidence_names_an_adapter_that_ended(end):
    plugin, _, model = classifier(bert, "lora")
    run = trained(model)
    assert verify(plugin, run).status == "active"
    change, says = ENDS[end]
    change(model.bert.encoder.layer[0].attention.self.query, model)
    evidence = verify(plugin, run)
    assert (evidence.status, says in evidence.seen) == ("inactive", True), evidence.seen


@pytest.mark.parametrize("options", [{"use_rslora": True}, {"lora_dropout": 0.1}, {"init_lora_weights": "pissa"}])
def test_evidence_knows_the_scale_and_the_dropout_of_an_adapter(options):
    plugin, recipe = Adapter(Adapter.Options(r=3, lora_alpha=7, **options)), Recipe()
    plugin.apply(recipe, context())
    evidence = verify(plugin, trained(recipe.model_steps[0](bert(), None)))
    assert evidence.status == "active", evidence.seen


@pytest.mark.filterwarnings(UNMATCHED)
def test_evidence_of_adapters_on_experts():
    """PEFT adapts the parameters of experts by wrappers that have no weight, and calls no layer of the adapter."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**TINY_LLAMA, **experts, "model_type": "qwen3_moe"}))
    model = add_adapter(model, options=Adapter.Options(always=True), task="CAUSAL_LM")
    calls = Counter()
    for name, module in model.named_modules():
        module.register_forward_hook(lambda *_, name=name: calls.update([name]))
    model(input_ids=torch.ones(2, 8, dtype=torch.long))
    run = SimpleNamespace(inner_model=model, observation=SimpleNamespace(forward_calls=calls))
    (wrapper, *_) = [name for name, module in model.named_modules() if hasattr(module, "parameter_name")]
    assert calls[wrapper]
    assert layers_without_adapter(model) == []
    assert idle_adapters(run) == []
    model.get_submodule(f"{wrapper}.lora_B.default").weight.requires_grad_(False)
    assert idle_adapters(run) == [wrapper]


def test_evidence_reads_states_that_torchao_quantized():
    from torchao.optim.subclass_8bit import OptimState8bit

    zero, moment = (OptimState8bit.zeros((64, 64)) for _ in range(2))
    moment.copy_(torch.ones(64, 64))
    assert tensors_with_moment([{"exp_avg": zero}, {"exp_avg": moment}]) == 1


@pytest.mark.integration
@pytest.mark.soak
def test_dora_with_checkpointing_is_compiled_in_one_graph_a_layer(tmp_path):
    in_fork(partial(train_dora_compiled, tmp_path), tmp_path / "output")


def train_dora_compiled(tmp_path):
    from torch._dynamo.utils import counters

    counters["graph_break"].clear()
    tables = {"adapter": {"kind": "dora", "always": True}, "checkpointing": {}, "compile": {"scope": "block"}}
    recorder = train_tiny(plan_for(tiny_profile(**tables), tiny_job(tmp_path, "causal-lm")), tmp_path)
    evidence = {entry.name: evidence for entry, evidence in recorder.found}
    assert evidence["compile"].status == "active", evidence["compile"].seen
    assert not counters["graph_break"]


def adapters_without_effect(patch):
    """PEFT's layers compute the frozen layer alone."""
    from peft.tuners.lora.layer import Linear

    patch.setattr(Linear, "forward", lambda self, x, *args, **kwargs: self.base_layer(x))


def layers_left_out(patch, chosen):
    """PEFT adds no adapter to the chosen modules."""
    from peft.tuners.lora import LoraModel

    numbers, real = count(), LoraModel._create_and_replace

    def create(self, *args, **kwargs):
        if not chosen(next(numbers)):
            real(self, *args, **kwargs)

    patch.setattr(LoraModel, "_create_and_replace", create)


def disable_half(run):
    for layer in [module for module in run.inner_model.modules() if hasattr(module, "lora_B")][::2]:
        layer._disable_adapters = True


ALWAYS = {"always": True, "r": 4}
CASES = Cases(
    invalid=(({"target_modules": []}, "at least 1 item"), ({"layers_to_transform": [1]}, "needs the names")),
    options=ALWAYS,
    mutations=(Mutation("the adapter adds nothing", adapters_without_effect, "tensors in the optimizer received", ALWAYS),),
    parts=(Part("layers without an adapter", layers_left_out, ALWAYS, disable_half),),
)
