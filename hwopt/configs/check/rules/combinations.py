"""Settings that do something else than they seem to, or that are wrong together: a row for each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from operator import not_
from typing import Any, NamedTuple

from hwopt.configs.check import TRAINERS, TRANSFORMERS, Facts, Finding, Level, Rule, Tools
from hwopt.configs.launchers import NOTHING
from hwopt.configs.view import View, is_number
from hwopt.model.facts import EXCEEDS_FP16
from hwopt.text import cut

FLASH = ("flash_attention_2", "flash_attention_3")
REENTRANT = "gradient_checkpointing_kwargs.use_reentrant"


def positive(value: Any) -> bool:
    return is_number(value) and value > 0


def several(value: Any) -> bool:
    return is_number(value) and value > 1


def given(value: Any) -> bool:
    return value not in (*NOTHING, "", "no", [], {})


GATHERED = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
HF: Tools = ("transformers",)


def among(*values: Any) -> Callable[[Any], bool]:
    """A test whether a value is one of `values`."""
    return lambda value: value in values


def off(value: Any) -> bool:
    """Whether a setting is not on or not given, which a finding does not mention, unlike `not_`."""
    return not value


def is_zero(value: Any) -> bool:
    return is_number(value) and value == 0


BF16 = {"mixed_precision": "bf16"}
HALF_TYPE = re.compile("(float16|fp16|bf16|half)$")
IN_GRAPHS, NO_GRAPHS = among("reduce-overhead", "max-autotune"), {"torch_compile_mode": "default"}
BEYOND_FP16 = "Its activations can exceed 65,504, the largest fp16 number: the loss is NaN. Without bf16 train in fp32."
SPLIT = "A checkpoint has no weights that from_pretrained reads, until zero_to_fp32.py has joined the parts."
SAVED = "deepspeed_config.zero3_save_16bit_model"
ON_CPU = "On a CPU accelerate trains in fp32, without a message. It can train in bf16."


class Doubt(NamedTuple):
    """A rule with its rows: level, tools, settings, why, and what to write; "" as what to write: remove the first setting."""

    rule: str
    about: str
    source: str
    rows: tuple[tuple[Level, Tools, Mapping[str, Any], str, Any], ...]


def single(name: str, about: str, source: str, *row: Any) -> Doubt:
    return Doubt(name, about, source, (row,))


# fmt: off
DOUBTS = (
    Doubt("no-effect", "A setting that another one makes ineffective, such as warmup_ratio beside warmup_steps",
        "transformers, axolotl, LLaMA-Factory, DeepSpeed, accelerate", (
        ("warning", TRANSFORMERS, {"fp16_opt_level": bool}, "It belongs to Apex: torch's own AMP keeps weights in fp32 (O1).",
            'remove {fp16_opt_level}; a hwopt profile has level = "O2" for half-precision weights'),
        ("warning", TRANSFORMERS, {"warmup_ratio": positive, "warmup_steps": positive}, "The steps count.", ""),
        *(("warning", (), {word: positive, "lr_scheduler_type": "constant"}, "The first steps have the full rate.",
            {"lr_scheduler_type": "constant_with_warmup"}) for word in ("warmup_steps", "warmup_ratio")),
        ("information", (), {"num_train_epochs": is_number, "max_steps": positive}, "The run ends after the steps.", ""),
        ("information", TRANSFORMERS, {"save_steps": positive, "save_strategy": among("epoch", "no")}, "", ""),
        ("warning", HF, {"eval_steps": positive, "eval_strategy": among(None, "no")}, "Nothing is evaluated: the default is no.",
            {"eval_strategy": "steps"}),
        ("warning", TRANSFORMERS, {"torch_compile": False, "torch_compile_mode": bool}, "A mode switches compilation on.",
            "remove {torch_compile_mode}"),
        ("warning", HF, {"BitsAndBytesConfig.bnb_4bit_compute_dtype": bool, "load_in_4bit": not_},
            "It is the type of products with 4-bit weights.", ""),
        ("warning", (), {"fp16": True, "use_cpu": True}, ON_CPU, {"fp16": False, "bf16": True}),
        ("warning", (), {"mixed_precision": "fp16", "use_cpu": True}, ON_CPU, {"mixed_precision": "bf16"}),
        ("warning", ("axolotl",), {"fp16": True, "bf16": True}, "axolotl trains in bf16.", {"fp16": False}),
        ("information", ("axolotl",), {"bf16": among("auto", "Auto"), "fp16": True}, "axolotl trains in fp16.", {"bf16": False}),
        ("information", ("deepspeed",), {GATHERED: True, "zero_stage": among(0, 1, 2)}, "Only stage 3 splits the weights.", ""),
        ("error", (), {"zero_offload": "parameters", "zero_stage": among(0, 1, 2)}, "DeepSpeed may stop.", {"zero_stage": 3}),
        ("error", (), {"zero_offload": "optimizer", "zero_stage": 0}, "DeepSpeed may stop.", {"zero_stage": 1}),
        ("warning", ("accelerate",), {"zero_stage": is_number, "distributed_type": lambda kind: kind != "DEEPSPEED"},
            "The launcher does not start DeepSpeed.", "distributed_type: DEEPSPEED, or remove deepspeed_config"))),
    single("batch-power-of-two", "A batch that is not a power of 2", "notes.md#rtx-3070-64-rows: power of 2 is better",
        "information", (), {"per_device_train_batch_size": lambda rows: positive(rows) and int(rows) & (int(rows) - 1) != 0},
        "It need not be a power of 2: tensor cores want hidden sizes and token counts in multiples of 8.", None),
    single("batch-search", "auto_find_batch_size, which lowers the batch and not the accumulation", "transformers",
        "warning", TRANSFORMERS, {"auto_find_batch_size": True},
        "After an out-of-memory error a step has fewer rows: two runs of one file differ.", {"auto_find_batch_size": False}),
    single("fp16-weights", "Weights in half precision beside fp16", "torch, GradScaler: unscale FP16 gradients; trl#4901 (bf16)",
        "error", TRAINERS, {"torch_dtype": lambda kind: HALF_TYPE.search(str(kind)), "fp16": True, "use_peft": off},
        "The first update stops: GradScaler takes gradients in fp32 only.", {"torch_dtype": "float32"}),
    Doubt("fp16-model", "fp16 for a model trained in bf16, whose activations exceed fp16's range: Gemma, T5",
        "transformers#36822 (Gemma) and #9295 (T5)", tuple(
        ("warning", (), {word: value, "model_name_or_path": lambda name: EXCEEDS_FP16.search(str(name))}, BEYOND_FP16, fix)
        for word, value, fix in (("fp16", True, {"fp16": False, "bf16": True}), ("mixed_precision", "fp16", BF16)))),
    single("cache-checkpointing", "A cache beside activation checkpointing", "transformers, use_cache",
        "warning", TRAINERS, {"use_cache": True, "gradient_checkpointing": True},
        "Training needs none. Most models turn it off with a message; others keep it, which costs memory.", {"use_cache": False}),
    single("unused-checkpointing", "A search for unused parameters beside reentrant checkpointing", "transformers#4659; DDP",
        "warning", TRAINERS, {"ddp_find_unused_parameters": True, "gradient_checkpointing": True, REENTRANT: among(None, True),
        "model_name_or_path": lambda name: not re.search("(?i)gemma-?4", str(name))},  # for these axolotl turns it off
        "With reentrant checkpointing, the default of transformers 4, the first backward pass on several ranks stops.",
        {"ddp_find_unused_parameters": False}),
    single("dora-dropout", "Dropout with DoRA", "PEFT, DoRA: a faster path without dropout",
        "information", (), {"lora_dropout": positive, "use_dora": True},
        "PEFT has a faster path without it: +29 % samples a second.", {"lora_dropout": 0}),
    single("compile-widths", "CUDA graphs, which are recorded again for each new width of a batch", "pytorch#188150",
        "warning", TRAINERS, {"torch_compile_mode": IN_GRAPHS, "packing": off},
        "Each new width of a batch records a CUDA graph, which costs time and memory; a hwopt profile pads to a few.", NO_GRAPHS),
    single("compile-graphs", "CUDA graphs with several micro-batches in a step", "pytorch#169545, pytorch#96693",
        "error", TRAINERS, {"torch_compile": True, "torch_compile_mode": IN_GRAPHS, "gradient_accumulation_steps": several},
        "The next micro-batch overwrites outputs of a graph: the backward pass fails, or gradients are wrong.", NO_GRAPHS),
    single("pin-without-workers", "Pinned memory without workers", "torch, memory pinning",
        "information", (), {"dataloader_pin_memory": True, "dataloader_num_workers": is_zero},
        "The training process copies each batch into pinned memory itself, between two steps.", {"dataloader_num_workers": 2}),
    single("workers-restarted", "Workers that end with an epoch", "notes.md#rtx-3070-64-rows: disable persistent workers",
        "information", (), {"dataloader_persistent_workers": False, "dataloader_num_workers": lambda number: number != 0},
        "Each epoch starts new worker processes, which costs seconds.", {"dataloader_persistent_workers": True}),
    single("nonfinite-filter", "A filter of losses that are not finite", "transformers, logging_nan_inf_filter",
        "information", (), {"logging_nan_inf_filter": True},
        "NaN losses are logged as the mean of the others: a broken run looks sound.", {"logging_nan_inf_filter": False}),
    Doubt("split-weights", "ZeRO stage 3 without gathering the weights to save them", "transformers, deepspeed.md", tuple(
        ("warning", (), {key: False, "zero_stage": 3}, SPLIT, {key: True}) for key in (GATHERED, SAVED))),
    Doubt("tf32-beside-half", "TF32 beside fp16 or bf16, where few products are left in fp32", "TF32: fp32 tensors only", tuple(
        ("information", (), {"tf32": True, half: True}, "TF32 is for products of fp32 tensors, of which few are left.", None)
        for half in ("bf16", "fp16"))),
)
# fmt: on


def as_written(view: View, word: str, expected: Any) -> str:
    """The line of the file that sets `word`, shortened; without one "no …", or "" if the rule does not ask for it."""
    if (found := view.found(word)) is None:
        return f"no {view.spelled(word)}" if expected is not_ else ""
    return cut(view.line(word, view.source.values.get(found.key, found.value)), 100)


def meets_all(view: View, tools: Tools, settings: Mapping[str, Any]) -> bool:
    return (not tools or view.tool in tools) and all(view.meets(word, expected) for word, expected in settings.items())


def written(view: View, settings: Mapping[str, Any]) -> str:
    lines = dict.fromkeys(as_written(view, word, expected) for word, expected in settings.items())
    return " beside ".join(filter(None, lines))


def keyed(text: str, spelled: Callable[[str], str]) -> str:
    """`text` with each word in braces as its key."""
    return re.sub(r"\{([\w.]+)\}", lambda found: spelled(found[1]), text)


def instead(view: View, fix: Any, word: str) -> str:
    text = f"remove {{{word}}}" if fix == "" else fix or ""
    return keyed(text, view.spelled) if isinstance(text, str) else view.lines(text)


def rule_of(doubt: Doubt) -> Rule:
    def function(view: View, facts: Facts) -> Iterator[Finding]:
        for level, tools, settings, why, fix in doubt.rows:
            if meets_all(view, tools, settings):
                word = next(iter(settings))
                effect = f"{view.spelled(word)} has no effect. " if doubt.rule == "no-effect" else ""
                yield Finding(word, f"{written(view, settings)}.", (effect + why).strip(), instead(view, fix, word), level)

    return Rule(doubt.rule, doubt.rows[0][0], doubt.about, doubt.source, function)


RULES_OF_ROWS = tuple(map(rule_of, DOUBTS))
