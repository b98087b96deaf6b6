"""Settings that a tool refuses, alone or together: a row for each, by the checks in the sources of the tool."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import not_
from typing import Any

from hwopt.configs.check import TRAINERS, TRANSFORMERS, Facts, Finding, Tools, rule
from hwopt.configs.check.rules.combinations import HF, among, given, instead, is_zero, meets_all, off, positive, several, written
from hwopt.configs.view import TOOL_NAMES, View, is_number
from hwopt.configs.words import ARGUMENTS, MODULES

FSDP = "fsdp_config.fsdp_"
FSDP_RUNS = {"distributed_type": among(None, "FSDP")}  # else the launcher does not read the part
FSDP_VERSIONS = ("fsdp_version", "fsdp_config.fsdp_version")

PAIRS: Mapping[Tools, str] = {
    TRAINERS: "fp16_full_eval bf16_full_eval, fsdp deepspeed, load_in_8bit load_in_4bit",
    HF: """auto_find_batch_size num_generations, generation_batch_size steps_per_generation, LoraConfig.lora_bias use_dora,
        sync_ref_model use_peft, sync_ref_model precompute_ref_log_probs""",
    ("axolotl",): """save_steps saves_per_epoch, eval_steps evals_per_epoch, warmup_ratio warmup_steps, sample_packing rl,
        val_set_size validation_file, val_set_size streaming, val_set_size pretraining_dataset, max_memory gpu_memory_limit,
        batch_size gradient_accumulation_steps, cut_cross_entropy liger_fused_linear_cross_entropy, lora_mlp_kernel load_in_8bit,
        lora_qkv_kernel load_in_8bit, lora_o_kernel load_in_8bit, lora_mlp_kernel trust_remote_code, relora deepspeed,
        lora_qkv_kernel trust_remote_code, lora_o_kernel trust_remote_code, lora_dropout lora_target_parameters""",
    ("llama-factory",): """val_size eval_dataset, max_samples streaming, train_on_prompt mask_history, use_apollo deepspeed,
        pissa_init quantization_bit, resize_vocab quantization_bit, use_galore deepspeed""",
}
"""Tools -> settings that they refuse if the one behind it is given too."""
NEEDS: Mapping[Tools, str] = {
    TRAINERS: "dataloader_prefetch_factor dataloader_num_workers, dataloader_persistent_workers dataloader_num_workers",
    ("axolotl",): """streaming max_steps, pretraining_dataset max_steps, activation_offloading gradient_checkpointing,
        early_stopping_patience save_steps, early_stopping_patience eval_steps, deepcompile deepspeed""",
    ("llama-factory",): "streaming max_steps",
}
"""Tools -> settings that they refuse without the one behind it."""
ONE_LAYER = MODULES - {"all-linear", "lm_head"}  # as a text each is a pattern for the whole path of a layer
MEASURED = ("loss", "runtime", "samples_per_second", "steps_per_second")  # without compute_metrics
USUAL = {"dataloader_num_workers": 2, "max_steps": 1000, "save_steps": 100, "eval_steps": 100, "gradient_checkpointing": True}
IN_DEEPSPEED = ("mixed_precision", "zero_stage", "zero_offload", "max_grad_norm", "gradient_accumulation_steps")
IS_TWO, IS_TEXT = (lambda value: str(value) == "2"), (lambda value: isinstance(value, str))
NOT_TWO = {key: lambda version: str(version) != "2" for key in FSDP_VERSIONS}
NOT_SFT, NOT_LORA, OVER_CARDS = among("pt", "rm", "ppo", "dpo", "kto"), among("full", "freeze", "oft"), among("auto", "balanced")
PROJECTED, LAYERWISE = (lambda name: str(name)[:6] in ("galore", "apollo")), (lambda name: str(name).endswith("layerwise"))
WITHOUT_MINIMUM = among(None, "linear", "cosine", "polynomial", "constant", "constant_with_warmup")
EVALUATES, NO_ROWS = (lambda value: value not in (None, "no", 0)), {"validation_file": off, "test_datasets": off}
# fmt: off
REFUSED: Mapping[Tools, tuple[tuple[Mapping[str, Any], Any], ...]] = {
    (*TRANSFORMERS, "deepspeed"): (({"bf16": True, "fp16": True}, {"fp16": False}),),
    TRANSFORMERS: (
        ({"lr_scheduler_type": lambda kind: str(kind).endswith(("min_lr", "decay")), "lr_scheduler_kwargs": not_},
            "lr_scheduler_kwargs with min_lr_rate, or num_decay_steps for warmup_stable_decay"),
        ({"lr_scheduler_kwargs": lambda options: "min_lr" in str(options), "lr_scheduler_type": WITHOUT_MINIMUM},
            {"lr_scheduler_type": "cosine_with_min_lr"}),
        ({"lr_scheduler_type": among("reduce_lr_on_plateau", "greedy"), "eval_strategy": among(None, "no")},
            {"eval_strategy": "epoch"}),
        ({"logging_steps": is_zero, "logging_strategy": among(None, "steps")}, {"logging_steps": 10}),
        *(({f"{kind}_steps": lambda steps: positive(steps) and steps > 1 and steps % 1 > 0}, "a whole number, or a share below 1")
          for kind in ("eval", "save", "logging")),
        ({"optim": PROJECTED, "optim_target_modules": not_}, {"optim_target_modules": "all-linear"}),
        ({"optim": LAYERWISE, "gradient_accumulation_steps": several}, {"gradient_accumulation_steps": 1}),
        ({"save_only_model": True, "load_best_model_at_end": True, "deepspeed": given}, {"save_only_model": False}),
        ({"auto_find_batch_size": True, "zero_stage": 3}, {"auto_find_batch_size": False}),
    ),
    ("KTOConfig",): (({"per_device_train_batch_size": 1, "loss_type": among(None, "kto")}, {"per_device_train_batch_size": 2}),),
    ("DPOConfig",): (({"loss_type": lambda name: "exo_pair" in str(name), "label_smoothing": not_}, {"label_smoothing": 1e-3}),),
    ("RewardConfig",): (({"from_pretrained.num_labels": several}, "num_labels=1"),),
    ("GRPOConfig", "RLOOConfig"): (({"temperature": is_zero}, {"temperature": 1.0}),),
    ("GRPOConfig",): (({"sync_ref_model": True, "beta": among(None, 0)}, {"beta": 0.04}),),
    ("SFTConfig",): (({"padding_free": True, "packing": off, "max_length": lambda _: True}, "packing=True, or max_length=None"),),
    HF: (
        ({"LoraConfig.target_modules": lambda it: IS_TEXT(it) and ("," in it or it in ONE_LAYER)}, "give a list of names"),
        ({"layers_to_transform": given, "lora_target_modules": IS_TEXT}, "give the modules as a list of names"),
        ({"init_lora_weights": "loftq", "LoraConfig.loftq_config": not_}, "loftq_config=LoftQConfig(loftq_bits=4)"),
        ({"metric_for_best_model": lambda name: not str(name or "loss").endswith(MEASURED), "eval_strategy": EVALUATES,
          "Trainer.compute_metrics": "not given"}, "give the trainer a function compute_metrics that returns it"),
        ({"Trainer.eval_dataset": "not given", "eval_strategy": EVALUATES}, "give the Trainer an eval_dataset"),
        ({"lora_target_modules": lambda names: "lm_head" in str(names), "task": "causal-lm"}, 'modules_to_save=["lm_head"]'),
        ({"Trainer.peft_config": "beside get_peft_model"}, "remove peft_config, or get_peft_model"),
        ({"LoraConfig.inference_mode": True}, "remove inference_mode, which freezes the adapter"),
        *(({"from_pretrained.device_map": OVER_CARDS, **by}, "remove device_map") for by in ({"zero_stage": 3}, {"fsdp": given})),
    ),
    ("accelerate",): (
        *(({word: lambda value: value is not None, "deepspeed": given}, f"remove {{{word}}}") for word in IN_DEEPSPEED),
        ({f"{FSDP}reshard_after_forward": lambda value: str(value).lower() not in ("none", "true", "false"),
          f"{FSDP}version": IS_TWO, **FSDP_RUNS},
            {f"{FSDP}reshard_after_forward": True}),
        ({f"{FSDP}state_dict_type": lambda kind: "LOCAL" in str(kind).upper(), f"{FSDP}version": IS_TWO, **FSDP_RUNS},
            {f"{FSDP}state_dict_type": "SHARDED_STATE_DICT"}),
        ({f"{FSDP}sync_module_states": lambda value: str(value).lower() == "false",
          f"{FSDP}cpu_ram_efficient_loading": lambda value: str(value).lower() != "false", **FSDP_RUNS},
            {f"{FSDP}sync_module_states": True}),
    ),
    ("deepspeed",): (
        *(({"scheduler.type": kind, "max_steps": not_, "scheduler.params.total_num_steps": not_}, "give total_num_steps")
          for kind in ("WarmupDecayLR", "WarmupCosineLR")),
        *(({f"zero_optimization.{part}.device": "nvme", f"zero_optimization.{part}.nvme_path": not_}, f"give {part} a nvme_path")
          for part in ("offload_param", "offload_optimizer")),
    ),
    ("axolotl",): (
        ({"datasets.0.type": lambda kind: str(kind).startswith("sharegpt")}, "type: chat_template"),
        *(({f"{kind}_steps": positive, f"{kind}_strategy": lambda it: it and it != "steps"}, f"remove {{{kind}_steps}}")
          for kind in ("save", "eval")),
        ({"eval_strategy": EVALUATES, "eval_fraction": is_zero, **NO_ROWS}, {"eval_fraction": 0.05}),
        ({"eval_steps": EVALUATES, "eval_strategy": among(None), "eval_fraction": is_zero, **NO_ROWS}, {"eval_fraction": 0.05}),
        ({"adapter": "qlora", "load_in_8bit": True}, {"load_in_8bit": False, "load_in_4bit": True}),
        ({"adapter": "qlora", "load_in_8bit": off, "load_in_4bit": not_, "peft.loftq_config": off}, {"load_in_4bit": True}),
        ({"rl": "simpo", "warmup_ratio": positive}, "warmup_steps instead of {warmup_ratio}"),
        ({"rl": "kto", "remove_unused_columns": lambda value: value is not False}, {"remove_unused_columns": False}),
        ({"dpo_loss_type": given, "rl": lambda kind: kind != "dpo"}, "rl: dpo"),
        ({"save_strategy": "best", "metric_for_best_model": not_}, {"metric_for_best_model": "eval_loss"}),
        ({"save_safetensors": False}, "remove save_safetensors"),
        ({"chat_template": "jinja", "chat_template_jinja": not_}, "chat_template_jinja: TEMPLATE"),
        ({"optim": "muon", "deepspeed": given}, {"optim": "adamw_torch"}),
        *(({"optim": lambda name: "8bit" in str(name), f"fsdp_config.{key}": True, **NOT_TWO}, {"optim": "adamw_torch"})
          for key in ("offload_params", "fsdp_offload_params")),
        *(row for key in FSDP_VERSIONS for row in (
            ({"optim": among("adamw_8bit", "adamw_bnb_8bit"), key: IS_TWO}, {"optim": "adamw_torch_8bit"}),
            ({"fsdp_config.cpu_ram_efficient_loading": True, "load_in_4bit": True, key: IS_TWO}, "set it to false"),
            ({"load_in_4bit": True, "rl": among("dpo", "kto", "orpo", "ipo"), key: IS_TWO}, "remove {load_in_4bit}"),
            ({"load_in_8bit": True, "rl": among("dpo", "kto", "orpo", "ipo"), key: IS_TWO}, "remove {load_in_8bit}"))),
        ({"tokens": bool, "use_peft": True, "modules_to_save": not_}, "lora_modules_to_save: [embed_tokens, lm_head]"),
    ),
    ("llama-factory",): (
        *(({key: EVALUATES, "eval_fraction": not_, "validation_file": off, "tokenized_path": off}, {"eval_fraction": 0.05})
          for key in ("eval_strategy", "do_eval", "do_predict", "predict_with_generate")),
        ({"do_predict": True, "predict_with_generate": not_, "stage": among(None, "sft")}, "predict_with_generate: true"),
        *(({key: True, "stage": NOT_SFT}, f"remove {key}")
          for key in ("predict_with_generate", "neat_packing", "train_on_prompt", "mask_history")),
        ({"stage": among("rm", "ppo"), "load_best_model_at_end": True}, {"load_best_model_at_end": False}),
        ({"stage": "ppo", "reward_model": not_}, "give a reward_model"),
        ({"adapter_name_or_path": bool, "finetuning_type": NOT_LORA}, "finetuning_type: lora"),
        ({"quantization_bit": is_number, "finetuning_type": among("full", "freeze")}, "finetuning_type: lora"),
        *(({key: True, "finetuning_type": NOT_LORA}, f"remove {key}") for key in ("use_dora", "use_rslora", "pissa_init")),
        *(({f"use_{name}": True, "finetuning_type": among(None, "lora")}, "finetuning_type: full")
          for name in ("galore", "apollo", "badam")),
        *(({key: True, "zero_stage": 3}, "use ZeRO stage 2")
          for key in ("load_in_8bit", "predict_with_generate", "pure_bf16", "pissa_init", "use_unsloth")),
    ),
}
"""Tools -> settings that they refuse together, and what to write."""
# fmt: on


def is_own(view: View, word: str) -> bool:
    """Whether the file spells `word` as the tool does, and not as a program that reads its own files."""
    found = view.found(word)
    return view.tool != "transformers" or found is None or word == found.key or not ARGUMENTS.isdisjoint(found.path)


def refusals() -> Iterator[tuple[Tools, Mapping[str, Any], Any]]:
    """(tools, settings, fix) of all three tables."""
    for table, second, fix in ((PAIRS, given, "remove {0}"), (NEEDS, not_, "set {1}")):
        for tools, text in table.items():
            for words in (pair.split() for pair in text.split(",")):
                usual = {words[1]: USUAL[words[1]]} if second is not_ and words[1] in USUAL else ""
                yield tools, {words[0]: given, words[1]: second}, usual or fix.format(*(f"{{{word}}}" for word in words))
    yield from ((tools, *row) for tools, rows in REFUSED.items() for row in rows)


@rule("refused-pair", "error", source="transformers, TRL, PEFT, axolotl, LLaMA-Factory, DeepSpeed, accelerate: their checks")
def refused_pair(view: View, facts: Facts) -> Iterator[Finding]:
    """Settings that the tool refuses, such as fp16 and bf16 together, or save_steps and saves_per_epoch of axolotl."""
    for each in (each for each in view.unread_as("other") if view.tool == "axolotl" and each.word == "attn_implementation"):
        yield Finding(each.key, f"{each.key}: {each.reason}.", "axolotl takes one of them, and stops.", f"remove {each.key}")
    for tools, settings, fix in refusals():
        if meets_all(view, tools, settings) and is_own(view, word := next(iter(settings))):
            lines = written(view, settings)
            who = "The library" if view.tool == "transformers" else TOOL_NAMES[view.tool]  # also TRL or PEFT
            why = f"{who} refuses {'them together' if ' beside ' in lines else 'it'}, and stops."
            yield Finding(word, f"{lines}.", why, instead(view, fix, word))
