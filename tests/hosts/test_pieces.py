"""Single parts for a script: arguments, keywords of from_pretrained, an optimizer, a forecast, evidence without a profile."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hosts.scripts import bert, llama, padded, rows, t5, train
from peft import IA3Config, LoraConfig, get_peft_model
from transformers import BertConfig, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from trl import SFTConfig

import hwopt
from hwopt.errors import InputError, PluginError

WIDE = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 256}
CONFIG = BertConfig(vocab_size=1000, architectures=["BertForSequenceClassification"], **WIDE)
SMALL: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
ADAPTED = LlamaConfig(architectures=["LlamaForCausalLM"], dtype="bfloat16", **SMALL)
SWITCH = "activation_checkpointing" if hasattr(TrainingArguments, "activation_checkpointing") else "gradient_checkpointing"


def test_arguments_have_what_the_profile_sets_and_the_script_leaves_open(tmp_path: Path) -> None:
    found = hwopt.training_arguments("cpu", CONFIG, output_dir=str(tmp_path), learning_rate=3e-4)
    assert type(found) is TrainingArguments
    assert (found.bf16, found.optim, found.learning_rate) == (True, "adamw_torch_fused", 3e-4)
    lines = "\n".join(found.decisions)
    assert "precision: bf16 = True" in lines
    assert "length_batching: arguments cannot split a step by length; hwopt.optimized does" in lines


def test_own_arguments_win_and_rows_of_a_step_stay(tmp_path: Path) -> None:
    own = {"bf16": False, "optim": "adafactor", "per_device_train_batch_size": 6, "gradient_accumulation_steps": 3}
    found = hwopt.training_arguments("cpu", CONFIG, output_dir=str(tmp_path), **own)
    assert {name: getattr(found, name) for name in own} == own
    assert any("optim = 'adafactor' of your arguments wins" in line for line in found.decisions)


@pytest.mark.parametrize("workers", [0, 1, None])
def test_arguments_of_workers_are_those_that_torch_takes(workers: int | None, tmp_path: Path) -> None:
    """Without workers it refuses persistent ones and batches that they prepare ahead."""
    own = {} if workers is None else {"dataloader_num_workers": workers}
    args = hwopt.training_arguments("rtx3090_24gb", CONFIG, output_dir=str(tmp_path), report_to=[], **own)
    found = {args.dataloader_prefetch_factor is not None, args.dataloader_persistent_workers, args.dataloader_num_workers > 0}
    assert len(found) == 1
    assert workers in (None, args.dataloader_num_workers)
    made = Trainer(bert(), args, train_dataset=rows(), data_collator=lambda few: padded(few, True)).get_train_dataloader()
    assert made.num_workers == args.dataloader_num_workers


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
def test_arguments_are_in_fp32_where_the_plan_is_and_their_class_is_not(tmp_path: Path) -> None:
    for own, bf16 in ({}, False), ({"bf16": True}, True):
        plugins, line = {"precision": {"dtype": "fp32"}}, "bf16 = False instead of True, the default of SFTConfig"
        found = hwopt.training_arguments("cpu", CONFIG, SFTConfig, plugins=plugins, output_dir=str(tmp_path), **own)
        assert (found.bf16, line in "\n".join(found.decisions)) == (bf16, not bf16)


def test_model_kwargs_and_optimizer() -> None:
    assert hwopt.model_kwargs("cpu", CONFIG) == {"dtype": "float32", "attn_implementation": "sdpa"}
    parameter = torch.nn.Parameter(torch.ones(3))
    found = hwopt.optimizer("cpu")([{"params": [parameter], "weight_decay": 0.0}], lr=0.5)
    group = found.param_groups[0]
    assert (type(found), group["fused"], group["lr"], group["weight_decay"]) == (torch.optim.AdamW, True, 0.5, 0.0)
    assert hwopt.optimizer("rtx3070_8gb_qlora")([parameter], 0.25).param_groups[0]["lr"] == 0.25


def test_model_kwargs_quantize_as_the_profile_does(tmp_path: Path) -> None:
    LlamaForCausalLM(LlamaConfig(vocab_size=100, **SMALL)).save_pretrained(tmp_path)
    found = hwopt.model_kwargs("rtx3070_8gb_qlora", str(tmp_path), adapter={"always": True})
    assert type(LlamaForCausalLM.from_pretrained(tmp_path, **found).model.layers[0].mlp.up_proj).__name__ == "Linear4bit"
    assert found["quantization_config"].bnb_4bit_use_double_quant


def test_forecast_for_a_card_that_is_not_there(tmp_path: Path) -> None:
    for strategy in ("epoch", "no"):
        args = TrainingArguments(str(tmp_path), per_device_train_batch_size=8, use_cpu=True, eval_strategy=strategy)
        found = hwopt.fits(CONFIG, args, [{"input_ids": [1] * 40}], card="RTX 3090")
        assert (found.fits, found.memory.eval_peak_gib is None) == (True, strategy == "no")
    assert (found.memory.tier, found.memory.width) == ("traced", 48), "the next width of cuda_graphs"
    assert "on GeForce RTX 3090, 8 x 48 tokens" in str(found)


def test_forecast_of_packed_rows_is_that_of_the_whole_batch_with_the_head(tmp_path: Path) -> None:
    """`optimized` does not split packed rows, and SFTTrainer trains a language model whatever the config names."""
    own = {"use_cpu": True, "bf16": False, "max_length": 64, "per_device_train_batch_size": 16, SWITCH: False}
    plain = LlamaConfig(**SMALL)
    found = hwopt.fits(plain, SFTConfig(str(tmp_path), packing=True, **own), card="RTX 3090", batch={"train": 4})
    assert "16 x 64 tokens" in str(found)
    assert "16 x 64 tokens" in str(hwopt.fits(plain, SFTConfig(str(tmp_path), **own), card="RTX 3090", batch=False))
    assert found.plan.model.architecture == "LlamaForCausalLM"


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # of PEFT and TRL
def test_forecast_of_an_adapter_that_the_trainer_adds_or_the_model_has(tmp_path: Path) -> None:
    lora = LoraConfig(r=4, target_modules=["q_proj"], use_rslora=True, task_type="CAUSAL_LM")
    args = SFTConfig(str(tmp_path), use_cpu=True, bf16=True, max_length=64, **{SWITCH: False})
    model = get_peft_model(LlamaForCausalLM(ADAPTED).to(torch.bfloat16), lora)
    full, added, own = (
        hwopt.fits(each, args, card="RTX 3090", peft_config=config)
        for each, config in ((ADAPTED, None), (ADAPTED, lora), (model, None))
    )
    for found in (added, own):
        options = next(entry.options for entry in found.plan.entries if entry.name == "adapter")
        assert (options.kind, options.r, options.target_modules, options.use_rslora) == ("lora", 4, ("q_proj",), True)
    assert added.memory == own.memory != full.memory
    assert full.memory.parts["optimizer_state"] > 100 * added.memory.parts["optimizer_state"]
    assert full.memory.parts["weights"] > 1.9 * added.memory.parts["weights"]


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
def test_forecast_of_quantized_weights_and_of_adapters_that_it_does_not_know(tmp_path: Path) -> None:
    args = SFTConfig(str(tmp_path), use_cpu=True, bf16=False, max_length=64, **{SWITCH: False})
    lora = LoraConfig(task_type="CAUSAL_LM")
    args.model_init_kwargs = {"quantization_config": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True)}
    found = hwopt.fits(ADAPTED, args, card="RTX 3090", peft_config=lora)
    options = next(entry.options for entry in found.plan.entries if entry.name == "quantize")
    assert (options.bits, options.double) == (4, True)
    assert "there is no adapter" in hwopt.fits(ADAPTED, args).why
    args.model_init_kwargs = None
    for config, why in (
        (LoraConfig(rank_pattern={"q_proj": 8}), "rank_pattern of LoraConfig is not known"),
        (LoraConfig(target_modules="model.*"), "target_modules as a regular expression"),
        (IA3Config(), "IA3Config is not a LoraConfig"),
    ):
        assert why in hwopt.fits(ADAPTED, args, peft_config=config).why
    args.model_init_kwargs = {"dtype": "float32"}
    assert hwopt.fits(ADAPTED, args, card="RTX 3090", peft_config=lora)
    args.bf16 = True
    for card, dtype in (("RTX 3090", "bfloat16"), ("Tesla T4", "float16")):  # autocast would keep copies of the weights
        why = hwopt.fits(ADAPTED, args, card=card, peft_config=lora).why
        assert f"copies the forecast does not count: load the model with dtype=torch.{dtype}" in why
        args.model_init_kwargs = None  # ADAPTED is in bfloat16


def test_forecast_says_what_does_not_fit_and_what_it_does_not_know(tmp_path: Path) -> None:
    from trl import DPOConfig

    large = LlamaConfig(architectures=["LlamaForCausalLM"], num_hidden_layers=2, hidden_size=8192, intermediate_size=32768)
    args = TrainingArguments(str(tmp_path), use_cpu=True)
    found = hwopt.fits(large, args, card="Tesla T4")
    assert found.fits is False
    assert str(found).startswith("does not fit: ")
    unknown = hwopt.fits(CONFIG, DPOConfig(str(tmp_path), use_cpu=True, bf16=False, **{SWITCH: False}))
    assert (unknown.fits, bool(unknown)) == (None, False)
    assert "DPOConfig: its trainer may hold a second model" in str(unknown)
    with pytest.raises(InputError, match="^args: expected TrainingArguments.*got 'out'"):
        hwopt.fits(CONFIG, "out")
    for into in (dict, "SFTConfig"):
        with pytest.raises(InputError, match=f"^into: expected TrainingArguments.*got {into!r}"):
            hwopt.training_arguments("cpu", CONFIG, into=into)
    for other in ("RTX 9999", "NVIDIA L40S", "GeForce RTX 3060 Ti"):  # not the L4, nor the RTX 3060 with 12 GB
        with pytest.raises(InputError, match=f"card '{other}': no profile describes it. .*There are: "):
            hwopt.fits(CONFIG, args, card=other)


def test_forecast_knows_neither_other_states_nor_other_heads_and_dtypes(tmp_path: Path) -> None:
    for model, own, plugins, why in (
        (llama(), {"optim": "adafactor"}, {}, "optim = 'adafactor' of your arguments has other states than AdamW"),
        (llama(), {"label_smoothing_factor": 0.1}, {}, "label_smoothing_factor of your arguments needs the logits"),
        (t5(), {}, {}, "T5ForConditionalGeneration: the forecast does not read the targets of an encoder-decoder"),
        (BertConfig(architectures=["BertForMaskedLM"]), {}, {}, "BertForMaskedLM: the forecast knows the heads ForCausalLM"),
        (llama().bfloat16(), {}, {"precision": False}, "the weights are in bfloat16, and the forecast has them in float32"),
    ):
        found = hwopt.fits(model, TrainingArguments(str(tmp_path), use_cpu=True, **own), card="RTX 3090", **plugins)
        assert (found.fits, why in found.why) == (None, True), found


def trained(folder: Path, evidence: Any, **changes: Any) -> dict[str, tuple[str, str]]:
    """What -> (status, seen) after a run of the plain Trainer."""
    train(Trainer, folder, callbacks=[evidence], max_steps=1, **changes)
    return {what: (status, seen) for what, status, seen in evidence.found}


def test_evidence_says_what_a_plain_trainer_really_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = trained(tmp_path, hwopt.Evidence(), bf16=True, optim="adamw_torch_fused", **{SWITCH: True})
    assert found["attention"] == ("active", "attn_implementation sdpa; flash 8")
    assert found["precision"] == ("active", "bf16 asked; matmuls: 108 BFloat16")
    assert found["checkpointing"] == ("active", "2 of 2 layers recomputed")
    assert found["compile"][0] == "off"
    assert "hwopt: after step 1: active   optimizer: optim adamw_torch_fused: torch's AdamW" in capsys.readouterr().out


def test_strict_evidence_names_the_layers_that_fell_out(tmp_path: Path) -> None:
    class Sabotage(hwopt.Evidence):
        def on_step_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
            linear = objects["model"].classifier
            linear.forward = torch.autocast("cpu", enabled=False)(lambda x: torch.nn.functional.linear(x.float(), linear.weight))
            super().on_step_begin(args, state, control, **objects)

    with pytest.raises(PluginError, match=r"precision \(bf16 asked; .*in another dtype: classifier"):
        trained(tmp_path, Sabotage(strict=True), bf16=True)
