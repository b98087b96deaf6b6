import warnings
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import DAILY, named
from peft.utils.integrations import dequantize_module_weight
from plugin_cases import Cases, Chosen, Mutation, Part, Refused
from rich.console import Console
from safetensors.torch import load_file
from torch import nn

from hwopt.errors import PluginError
from hwopt.hardware.device import GIB, described
from hwopt.memory.forecast.planner import plan_memory
from hwopt.plugin.registry import Registry
from hwopt.report.memory import show_memory
from hwopt.testing import TINY_LLAMA, entry_of, plan_for, tiny_job, tiny_profile, train_tiny
from hwopt_plugins.quantize import dequantize, packed_linears, quantize

Quantize = Registry().plugin("quantize")
WIDER = {"hidden_size": 64, "num_key_value_heads": 1, "head_dim": 32, "sliding_window": 16}
TINY_GEMMA = TINY_LLAMA | WIDER | {"model_type": "gemma3_text", "intermediate_size": 128}
TINY_GPT_OSS = TINY_LLAMA | WIDER | {"model_type": "gpt_oss", "num_experts": 4, "num_experts_per_tok": 2}
LAYER = "model.layers.0.self_attn.q_proj"
MODELS = {"llama": TINY_LLAMA, "gemma3": TINY_GEMMA}


def job_of(folder: Path, config: dict[str, Any]) -> Any:
    return tiny_job(folder / "data", "causal-lm", config=config, max_steps=2, learning_rate=1e-2)


def tables(kind: str, bits: int, precision: dict[str, Any]) -> Any:
    return tiny_profile(
        adapter={"always": True, "r": 4, "kind": kind},
        quantize={"bits": bits, "dtype": "fp32"},
        precision=precision,
        optimizer={},
    )


@pytest.mark.parametrize(
    ("model", "kind", "bits"),
    [("llama", "dora", 4), ("llama", "lora", 8), pytest.param("gemma3", "dora", 4, marks=DAILY)],
)
def test_merged_weights_are_the_dequantized_ones_with_the_adapter(model: str, kind: str, bits: int, tmp_path: Path) -> None:
    """The saved model gives the outputs of the trained one: packed base and adapter, without a second rounding."""
    plan = plan_for(tables(kind, bits, {"dtype": "fp32"}), job_of(tmp_path, MODELS[model]))
    kept: dict[str, Any] = {}
    tokens = torch.tensor([[5, 6, 7, 8, 9]])

    def look(trained: Any, run: Any) -> Any:  # the last final step runs first
        trained.eval()
        with torch.no_grad():
            kept["logits"] = trained(input_ids=tokens).logits.clone()
        return trained

    plan.recipe.final_steps.append(look)
    recorder = train_tiny(plan, tmp_path)
    from transformers import AutoModelForCausalLM

    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final", dtype=torch.float32)
    saved.eval()
    with torch.no_grad():
        again = saved(input_ids=tokens).logits
    # LLM.int8() also rounds activations, but only in training
    assert torch.allclose(again, kept["logits"], atol=1e-5 if bits == 4 else 0.05), (again - kept["logits"]).abs().max()
    statuses = {entry.name: evidence for entry, evidence in recorder.found}
    assert statuses["quantize"].status == statuses["adapter"].status == "active", statuses


def test_adapter_is_saved_as_peft_saves_it(tmp_path: Path) -> None:
    """The adapter loads on its base model and has the keys of an adapter without quantization."""
    job = job_of(tmp_path, TINY_LLAMA | {"num_hidden_layers": 1})
    train_tiny(plan_for(tables("dora", 4, {"dtype": "fp32"}), job), tmp_path)
    folder = tmp_path / "run" / "final" / "adapter"
    train_tiny(plan_for(tiny_profile(adapter={"always": True, "r": 4, "kind": "dora"}), job), tmp_path / "plain")
    other = tmp_path / "plain" / "run" / "final"
    keys = load_file(folder / "adapter_model.safetensors").keys()
    assert keys == load_file(other / "adapter" / "adapter_model.safetensors").keys()
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():  # peft reads a property that transformers has renamed
        warnings.simplefilter("ignore", FutureWarning)
        opened = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(other), str(folder))
    assert any("lora_B" in name and bool(p.any()) for name, p in opened.named_parameters())


class Headless(nn.Sequential):
    def get_output_embeddings(self) -> None:
        """No layer, as in an encoder of transformers."""


def test_weights_of_an_fp32_file_are_unpacked_in_the_dtype_of_the_products() -> None:
    """Unpacked in fp32 they would take twice the memory of the forecast, and a copy for each product."""
    model = Headless(nn.Linear(64, 64, bias=False).requires_grad_(False))
    weight, x = model[0].weight.detach().clone(), torch.randn(2, 64)
    options = Quantize.Options(dtype="bf16")
    packed = quantize(model, SimpleNamespace(device=torch.device("cpu")), options=options)
    assert packed[0].weight.quant_state.dtype == torch.bfloat16
    plain = dequantize(packed, None)[0]
    assert plain.weight.dtype == torch.float32
    assert (plain.weight - weight).abs().max() < 0.2 * weight.abs().max()
    assert (plain.weight != plain.weight.bfloat16()).any(), "not rounded twice"
    assert plain(x).dtype == torch.float32


def test_half_weights_work_with_packed_weights(tmp_path: Path) -> None:
    plan = plan_for(tables("lora", 4, {"dtype": "bf16", "level": "O2"}), job_of(tmp_path, TINY_LLAMA))
    recorder = train_tiny(plan, tmp_path)
    assert {evidence.status for _, evidence in recorder.found} == {"active"}, recorder.found
    dtypes = {p.dtype for p in recorder.run.inner_model.parameters()}
    assert dtypes == {torch.float32}, "restored and dequantized at the end"
    assert {value.dtype for value in load_file(tmp_path / "run" / "final" / "model.safetensors").values()} == {torch.float32}


@pytest.mark.parametrize("bits", [4, pytest.param(8, marks=pytest.mark.integration)])
def test_loftq_starts_nearer_to_the_weights_before_quantization(bits: int, tmp_path: Path) -> None:
    """With the whole rank nothing of the rounding is left, whatever `lora_alpha`; the saved adapter says nothing of LoftQ."""
    width = TINY_LLAMA["hidden_size"]
    start: dict[str, Any] = {}

    def keep(model: Any, run: Any) -> Any:
        start["before"] = model.get_submodule(LAYER).weight.detach().clone()
        return model

    def look(model: Any, run: Any) -> Any:
        layer = model.get_submodule(f"base_model.model.{LAYER}")
        start["rounded"] = dequantize_module_weight(layer.get_base_layer()).detach()
        start["first"] = start["rounded"] + layer.get_delta_weight("default").detach()
        return model

    profile = tiny_profile(
        adapter={"always": True, "r": width, "lora_alpha": 3 * width, "init_lora_weights": "loftq"},
        quantize={"bits": bits, "dtype": "fp32"},
        optimizer={},
    )
    plan = plan_for(profile, job_of(tmp_path, TINY_LLAMA))
    plan.recipe.model_steps.insert(0, keep)
    plan.recipe.model_steps.append(look)
    recorder = train_tiny(plan, tmp_path)
    assert {evidence.status for _, evidence in recorder.found} == {"active"}, recorder.found
    assert recorder.run.inner_model.peft_config["default"].init_lora_weights is True
    torch.testing.assert_close(start["first"], start["before"], atol=1e-5, rtol=1e-4)
    assert not torch.allclose(start["rounded"], start["before"], atol=1e-4, rtol=1e-2)


def test_loftq_without_quantized_weights_is_inactive(tmp_path: Path) -> None:
    profile = tiny_profile(adapter={"always": True, "init_lora_weights": "loftq"}, optimizer={})
    recorder = train_tiny(plan_for(profile, job_of(tmp_path, TINY_LLAMA)), tmp_path)
    evidence = {entry.name: evidence for entry, evidence in recorder.found}["adapter"]
    assert evidence.status == "inactive"
    assert "[plugins.quantize]" in evidence.seen


def test_products_are_in_a_dtype_that_the_card_has(tmp_path: Path) -> None:
    """A T4 only emulates bf16."""
    profile = tiny_profile(adapter={"always": True}, quantize={"dtype": "bf16"}, optimizer={})
    for capability, decision, dtype in (((7, 5), "fallback", "fp16"), ((8, 6), "apply", "bf16")):
        plan = plan_for(profile, job_of(tmp_path, TINY_LLAMA), hardware=described("a card", capability, 16.0))
        entry = entry_of("quantize", plan)
        assert (entry.decision, entry.options.dtype) == (decision, dtype)
        assert f"products in {dtype}" in entry.reason


def test_quantize_without_an_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match=r"needs the plugin 'adapter': add a table \[plugins.adapter\]"):
        plan_for(tiny_profile(quantize={}), tiny_job(tmp_path, "causal-lm"))
    profile = tiny_profile(adapter={}, quantize={})
    entry = entry_of("quantize", plan_for(profile, tiny_job(tmp_path, "causal-lm")))
    assert (entry.decision, entry.reason) == ("skip", "needs plugin 'adapter', which is skipped")
    with pytest.raises(PluginError, match="which is skipped: .*To train without both set plugins.quantize.enabled = false"):
        plan_for(replace(profile, chosen=frozenset({"quantize"})), tiny_job(tmp_path, "causal-lm"))


def test_plan_counts_weights_of_4_bits(tmp_path: Path) -> None:
    """rtx3070_8gb_qlora, the config of Llama-2-7B with 2 of its 32 layers."""
    from hwopt import api

    config = (
        "{ model_type = 'llama', vocab_size = 32000, hidden_size = 4096, num_hidden_layers = 2, num_attention_heads = 32, "
        "intermediate_size = 11008, max_position_embeddings = 4096 }"
    )
    job = [f"model.config={config}", "task.kind=causal-lm", "data.train=none.txt", "data.max_length=512"]

    plan = api.resolve("rtx3070_8gb_qlora", assignments=job, hardware="profile", cache=tmp_path)
    memory = plan_memory(plan, tmp_path)
    assert memory.tier == "traced"
    assert memory.fits
    linear, embedded = 2 * (4 * 4096 * 4096 + 3 * 4096 * 11008), 2 * 32000 * 4096
    assert memory.parts["weights"] * 2**30 == pytest.approx(0.516 * linear + 2 * embedded, rel=0.02)


EXPERTS = {"model.layers.*.mlp.experts.gate_up_proj": 2 * 4 * 64 * 128, "model.layers.*.mlp.experts.down_proj": 2 * 4 * 64 * 64}


def test_plan_names_experts_that_stay_unquantized_with_their_bytes(tmp_path: Path) -> None:
    job = job_of(tmp_path, TINY_GPT_OSS)
    task = job.job.task.model_copy(update={"ignore_router_loss": True})
    job = replace(job, job=job.job.model_copy(update={"task": task}))
    plan = plan_for(tables("lora", 4, {"dtype": "bf16", "level": "O2"}), job)
    reason = next(entry.reason for entry in plan.entries if entry.name == "quantize")
    assert f"NOT quantized: {sum(EXPERTS.values()):,} weights outside of linear layers" in reason
    assert all(name in reason for name in EXPERTS)
    memory = plan_memory(plan, tmp_path / "cache")
    assert memory.unpacked_gib == {name: number * 2 / GIB for name, number in EXPERTS.items()}
    assert memory.parts["weights"] > sum(memory.unpacked_gib.values())
    console = Console(record=True, width=200)
    show_memory(console, replace(plan, memory=memory))
    assert "weights that keep their precision: " in console.export_text()
    evidence = next(evidence for entry, evidence in train_tiny(plan, tmp_path).found if entry.name == "quantize")
    others = sum(plan.model.other_weights.values())  # the routers and the biases of the experts too
    assert others > sum(EXPERTS.values())
    assert f"{2 * others:,} bytes in 10 matrices outside of linear layers not quantized" in evidence.seen
    assert evidence.status == "active"


def test_closed_form_counts_packed_weights_once_under_half_precision(tmp_path: Path) -> None:
    """Half weights apply to what is not packed, in any order of the plugins."""
    job = job_of(tmp_path, TINY_LLAMA)
    full = plan_for(tables("lora", 4, {"dtype": "fp32"}), job).memory_spec
    half = plan_for(tables("lora", 4, {"dtype": "bf16", "level": "O2"}), job).memory_spec
    assert full.packed_bytes == half.packed_bytes > 0
    assert full.weights - half.weights == 2 * (full.parameters - full.packed)


def weights_not_packed(patch: pytest.MonkeyPatch, chosen: Chosen) -> None:
    """bitsandbytes moves the weights of the chosen layers to the device without packing them."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    numbers, to, forward = count(), Params4bit.to, Linear4bit.forward

    def move(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.bnb_quantized or not chosen(next(numbers)):
            return to(self, *args, **kwargs)
        return nn.Parameter(self.data, requires_grad=False)

    def product(self: Any, x: torch.Tensor) -> torch.Tensor:
        packed = isinstance(self.weight, Params4bit)
        return forward(self, x) if packed else nn.functional.linear(x, self.weight.to(x.dtype), self.bias)

    patch.setattr(Params4bit, "to", move)
    patch.setattr(Linear4bit, "forward", product)


def weights_never_packed(patch: pytest.MonkeyPatch) -> None:
    weights_not_packed(patch, lambda number: True)


def unpack_half(run: Any) -> None:
    for parent, name, packed in packed_linears(run.inner_model)[::2]:
        layer = nn.Linear(packed.in_features, packed.out_features, bias=packed.bias is not None)
        setattr(parent, name, layer.requires_grad_(False))


ADAPTER = "[plugins.adapter]\nalways = true\n"
CASES = Cases(
    options={"dtype": "fp32"},
    kind="causal-lm",
    beside={"adapter": {"always": True, "r": 4}},
    conflicts=(
        Refused("zero", f"{ADAPTER}[plugins.quantize]\n[plugins.zero]\nstage = 2"),
        Refused("adapter", f'{ADAPTER}kind = "dora"\n[plugins.quantize]\nbits = 8'),
        Refused("fsdp", f"{ADAPTER}[plugins.quantize]\n[plugins.fsdp]", on_card=True),
    ),
    mutations=(Mutation("weights are not packed", weights_never_packed, "expected bits 4", {"dtype": "fp32"}),),
    parts=(Part("weights not packed", weights_not_packed, {"dtype": "fp32"}, unpack_half),),
)


def test_layer_that_casts_its_input_to_the_dtype_of_its_weight_stays_unpacked(tmp_path: Path) -> None:
    """T5's `wo`: the cast to packed bytes would end the run."""
    plan = plan_for(tables("lora", 4, {"dtype": "bf16"}), tiny_job(tmp_path / "data", "seq2seq-lm", max_steps=1))
    packed: list[str] = []

    def look(trained: Any, run: Any) -> Any:
        names = {module: name for name, module in trained.named_modules()}
        packed.extend(names[layer] for _, _, layer in packed_linears(trained))
        return trained

    plan.recipe.final_steps.append(look)
    train_tiny(plan, tmp_path)
    assert packed
    assert not any(".wo." in name for name in packed)


SWIN = {"model_type": "swin", "patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}
CONVNEXT = {"model_type": "convnext", "num_stages": 2, "hidden_sizes": [16, 32], "depths": [1, 1]}


@pytest.mark.parametrize("config", named({"swin": SWIN, "convnext": CONVNEXT}, ("swin",), DAILY))
def test_image_model_trains_an_adapter_above_weights_of_8_bits(config: dict[str, Any], tmp_path: Path) -> None:
    job = tiny_job(tmp_path / "data", "image-classification", config=config | {"image_size": 32}, max_steps=2, save_steps=2)
    plan = plan_for(tiny_profile(adapter={"always": True}, quantize={"bits": 8}), job)
    assert plan_memory(plan, tmp_path / "cache").tier == "traced"
    assert "active" in {evidence.status for entry, evidence in train_tiny(plan, tmp_path).found if entry.name == "adapter"}
