"""Settings that do something else than they seem to, or that are wrong together, and values out of range: a row for each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from operator import not_
from typing import Any, NamedTuple

from hwopt.configs.check import TRAINERS, TRANSFORMERS, Facts, Finding, Level, Rule, Tools, rule
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


def fraction(value: Any) -> bool:
    return is_number(value) and 0 <= value < 1


def off(value: Any) -> bool:
    """Whether a setting is not on or not given, which a finding does not mention, unlike `not_`."""
    return not value


def is_zero(value: Any) -> bool:
    return is_number(value) and value == 0


DECAYS = among(None, "linear", "cosine", "polynomial", "cosine_with_restarts", "cosine_with_min_lr", "warmup_stable_decay")
BF16 = {"mixed_precision": "bf16"}
HALF_TYPE = re.compile("(float16|fp16|bf16|half)$")
IN_GRAPHS, NO_GRAPHS = among("reduce-overhead", "max-autotune"), {"torch_compile_mode": "default"}
BEYOND_FP16 = "Its activations can exceed 65,504, the largest fp16 number: the loss is NaN. Without bf16 train in fp32."
SPLIT = "A checkpoint has no weights that from_pretrained reads, until zero_to_fp32.py has joined the parts."
SAVED = "deepspeed_config.zero3_save_16bit_model"
VLLM_TRAINERS: Tools = ("GRPOConfig", "RLOOConfig", "OnlineDPOConfig")
VLLM = ("vllm_mode", "vllm_gpu_memory_utilization", "vllm_tensor_parallel_size", "vllm_server_host", "vllm_server_base_url")
GENERATED = re.compile("(?i)rouge|bleu|meteor|chrf")
ON_CPU = "On a CPU accelerate trains in fp32, without a message. It can train in bf16."


class RuleRows(NamedTuple):
    """A rule with its rows: level, tools, settings, why, and what to write; "" as what to write: remove the first setting."""

    rule: str
    about: str
    source: str
    rows: tuple[tuple[Level, Tools, Mapping[str, Any], str, Any], ...]


def single(name: str, about: str, source: str, *row: Any) -> RuleRows:
    return RuleRows(name, about, source, (row,))


# fmt: off
RULE_ROWS = (
    RuleRows("no-effect", "A setting that another one makes ineffective, such as warmup_ratio beside warmup_steps",
        "transformers, axolotl, LLaMA-Factory, DeepSpeed, accelerate", (
        ("warning", TRANSFORMERS, {"fp16_opt_level": bool}, "It belongs to Apex: torch's own AMP keeps weights in fp32 (O1).",
            'remove {fp16_opt_level}; a hwopt profile has level = "O2" for half-precision weights'),
        ("warning", TRANSFORMERS, {"warmup_ratio": positive, "warmup_steps": positive}, "The steps count.", ""),
        *(("warning", (), {word: positive, "lr_scheduler_type": "constant"}, "The first steps have the full rate.",
            {"lr_scheduler_type": "constant_with_warmup"}) for word in ("warmup_steps", "warmup_ratio")),
        ("information", (), {"num_train_epochs": is_number, "max_steps": positive}, "The run ends after the steps.", ""),
        ("information", TRANSFORMERS, {"save_steps": positive, "save_strategy": among("epoch", "no")}, "", ""),
        ("warning", TRANSFORMERS, {"eval_steps": positive, "eval_strategy": among(None, "no")}, "Nothing is evaluated.",
            {"eval_strategy": "steps"}),
        ("warning", TRANSFORMERS, {"torch_compile": False, "torch_compile_mode": bool}, "A mode switches compilation on.",
            "remove {torch_compile_mode}"),
        *(("warning", HF, {f"generation_{key}": given, "predict_with_generate": not_}, "Evaluations generate nothing.",
            {"predict_with_generate": True}) for key in ("max_length", "num_beams")),
        *(("warning", HF, {f"BitsAndBytesConfig.bnb_4bit_{key}": bool, "load_in_4bit": not_}, "It is about 4-bit weights.", "")
          for key in ("compute_dtype", "use_double_quant", "quant_type")),
        *(("warning", VLLM_TRAINERS, {key: given, "use_vllm": among(None), **dict.fromkeys(VLLM[:place], among(None))},
            "use_vllm is not given: the model generates by itself, far slower.", {"use_vllm": True})
          for place, key in enumerate(VLLM)),
        ("warning", (), {"fp16": True, "use_cpu": True}, ON_CPU, {"fp16": False, "bf16": True}),
        ("warning", (), {"mixed_precision": "fp16", "use_cpu": True}, ON_CPU, {"mixed_precision": "bf16"}),
        ("warning", ("axolotl",), {"fp16": True, "bf16": True}, "axolotl trains in bf16.", {"fp16": False}),
        ("information", ("axolotl",), {"bf16": among("auto", "Auto"), "fp16": True}, "axolotl trains in fp16.", {"bf16": False}),
        ("information", ("deepspeed",), {GATHERED: True, "zero_stage": among(0, 1, 2)}, "Only stage 3 splits the weights.", ""),
        ("warning", ("deepspeed",), {"optimizer.params.lr": is_number, "scheduler.type": "WarmupDecayLR",
            "scheduler.params.warmup_max_lr": not_}, "The rate becomes warmup_max_lr, by default 0.001.", "give warmup_max_lr"),
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
    RuleRows("fp16-weights", "Weights in half precision beside fp16",
        "torch, GradScaler: unscale FP16 gradients; trl#4901 (bf16)", tuple(
        ("error", TRAINERS, {word: value, "fp16": True, "use_peft": off, "deepspeed": off, "fsdp": off},  # both take them
            "The first update stops: GradScaler takes gradients in fp32 only.", fix) for word, value, fix in (
            ("torch_dtype", lambda kind: HALF_TYPE.search(str(kind)), {"torch_dtype": "float32"}),
            ("model.half", True, "leave the model in fp32")))),
    RuleRows("fp16-model", "fp16 for a model trained in bf16, whose activations exceed fp16's range: Gemma, T5",
        "transformers#36822 (Gemma) and #9295 (T5)", tuple(
        ("warning", (), {word: value, "model_name_or_path": lambda name: EXCEEDS_FP16.search(str(name))}, BEYOND_FP16, fix)
        for word, value, fix in (("fp16", True, {"fp16": False, "bf16": True}), ("mixed_precision", "fp16", BF16)))),
    single("generated-metric", "A metric of generated texts without predict_with_generate", "transformers, Seq2SeqTrainer",
        "warning", ("Seq2SeqTrainingArguments",), {"metric_for_best_model": lambda name: GENERATED.search(str(name)),
        "predict_with_generate": not_}, "compute_metrics gets logits that saw the reference text, and no generated text.",
        {"predict_with_generate": True}),
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
    single("schedule-free", "A decaying schedule of the learning rate with a schedule-free optimizer", "arXiv:2405.15682",
        "warning", TRAINERS, {"optim": lambda name: str(name).startswith("schedule_free"), "lr_scheduler_type": DECAYS},
        "The optimizer averages the weights instead of a decay: with both, the last steps hardly count.",
        {"lr_scheduler_type": "constant_with_warmup"}),
    RuleRows("split-weights", "ZeRO stage 3 without gathering the weights to save them", "transformers, deepspeed.md", tuple(
        ("warning", (), {key: False, "zero_stage": 3}, SPLIT, {key: True}) for key in (GATHERED, SAVED))),
    RuleRows("tf32-beside-half", "TF32 beside fp16 or bf16, where few products are in fp32", "TF32: fp32 tensors only", tuple(
        ("information", (), {"tf32": True, half: True}, "TF32 is for products of fp32 tensors, of which few are left.", None)
        for half in ("bf16", "fp16"))),
)
# fmt: on


def meets_all(view: View, tools: Tools, settings: Mapping[str, Any]) -> bool:
    kinds = {view.tool, view.trainer, *view.source.calls}
    return not (tools and kinds.isdisjoint(tools)) and all(map(view.meets, settings, settings.values()))


def written(view: View, settings: Mapping[str, Any]) -> str:
    """The lines of the file that set `settings`, shortened, and which of those are missing that must be given: `not_`."""
    found = [each for each in map(view.found, settings) if each]
    values = view.source.values
    # what a profile gives a job, or a parent its profile, is known by its meaning only, such as fp16 = true
    lines = [
        each.key if view.is_hwopt and each.key not in values else cut(view.line(each.key, values.get(each.key, each.value)), 100)
        for each in found
    ]
    missing = [view.spelled(word) for word, expected in settings.items() if expected is not_ and view.found(word) is None]
    return " beside ".join(dict.fromkeys(lines)) + " without " * bool(missing) + " and ".join(dict.fromkeys(missing))


def instead(view: View, fix: Any, word: str) -> str:
    text = f"remove {{{word}}}" if fix == "" else fix or ""
    return re.sub(r"\{([\w.]+)\}", lambda word: view.spelled(word[1]), text) if isinstance(text, str) else view.lines(text)


def rule_of(rule_rows: RuleRows) -> Rule:
    def function(view: View, facts: Facts) -> Iterator[Finding]:
        for level, tools, settings, why, fix in rule_rows.rows:
            if meets_all(view, tools, settings):
                word = next(iter(settings))
                effect = f"{view.spelled(word)} has no effect. " if rule_rows.rule == "no-effect" and level != "error" else ""
                yield Finding(word, f"{written(view, settings)}.", (effect + why).strip(), instead(view, fix, word), level)

    return Rule(rule_rows.rule, rule_rows.rows[0][0], rule_rows.about, rule_rows.source, function)


RULES_OF_ROWS = tuple(map(rule_of, RULE_ROWS))


class Range(NamedTuple):
    holds: Callable[[float], bool]
    text: str
    why: str
    usual: Any
    """What to write instead."""
    level: Level | None = None


FRACTION = "at least 0 and below 1"
MEAN = "At 1 the running mean of the gradients never changes; above 1 it diverges."
# fmt: off
RANGES: Mapping[str, Range] = {
    "num_train_epochs": Range(positive, "above 0", "The run ends before its first step.", 3),
    "learning_rate": Range(lambda value: 0 < value <= 1, "above 0 and at most 1",
        "At 0 no weight changes; above 1 training diverges.", 2e-5),
    "weight_decay": Range(lambda value: 0 <= value <= 1, "from 0 to 1",
        "Far more decay than AdamW's 0.01 pulls all weights to 0.", 0.01, "warning"),
    "adam_beta1": Range(fraction, FRACTION, MEAN, 0.9),
    "adam_beta2": Range(fraction, FRACTION, MEAN, 0.999),
    "adam_epsilon": Range(lambda value: 0 <= value <= 1, "from 0 to 1", "Updates are divided by it: nearly none is left.", 1e-8),
    "label_smoothing_factor": Range(fraction, FRACTION, "At 1 the labels have no effect.", 0.1),
    "lora_r": Range(lambda value: value >= 1, "at least 1", "PEFT stops: the adapter has no rank.", 16),
    "lora_alpha": Range(positive, "above 0", "alpha / r scales the adapter: at 0 it has no effect.", 16),
    "lora_dropout": Range(fraction, FRACTION, "At 1 the adapter gets no input.", 0.05),
    "per_device_train_batch_size": Range(lambda value: value >= 1, "at least 1", "The trainer stops: a batch has no rows.", 8),
    "gradient_accumulation_steps": Range(lambda value: value >= 1, "at least 1", "The trainer stops: a step has no rows.", 1),
    "max_grad_norm": Range(lambda value: value >= 0, "at least 0", "A negative norm turns the gradients round.", 1.0),
    "eval_fraction": Range(lambda value: 0 <= value < 1 or value == int(value) > 1, "below 1, or a number of rows",
        "The split stops: more rows are held out than there are.", 0.05),
    "dataloader_num_workers": Range(lambda value: value >= 0, "at least 0", "The data loader stops.", 2),
    "fp16.loss_scale": Range(lambda value: value == 0 or value >= 1, "0, which adapts it, and 1 or more",
        "A loss scale below 1 makes small gradients 0 in fp16; it should enlarge them.", 0),
    "save_total_limit": Range(positive, "1 or more", "The Trainer keeps all checkpoints at 0.", 2, "warning"),
    "warmup_steps": Range(lambda value: value >= 0, "at least 0", "TrainingArguments stops.", 0.06),
    "num_generations": Range(several, "2 or more", "TRL stops: the advantages of a prompt compare several completions.", 8),
    "zero_stage": Range(lambda value: value in range(4), "0, 1, 2 and 3", "DeepSpeed stops.", 3),
}
# fmt: on


LEAST_SCALE, MOST_SCALE = 1 / 16, 64  # of what recipes take: the QLoRA paper has 1/4, others up to 32


@rule("lora-scale", "warning", words=("lora_alpha",), source="LoRA, arXiv:2106.09685, section 4.1", tools=TRAINERS)
def lora_scale(view: View, facts: Facts) -> Iterator[Finding]:
    """An adapter whose output is scaled to almost nothing, or far too much."""
    alpha, rank = view.number("lora_alpha") or 0, view.number("lora_r") or 0
    by_root = any("rslora" in key for key in view.source.values)
    if rank and alpha and not by_root and not LEAST_SCALE <= alpha / rank <= MOST_SCALE:
        what = f"{view.spelled('lora_alpha')} is {alpha:g} with rank {rank:g}, which scales the adapter by {alpha / rank:.2g}."
        why = f"{'Training can diverge' if alpha > rank else 'The adapter learns slowly'}; 0.25 to 2 are usual."
        yield Finding("lora_alpha", what, why, view.line("lora_alpha", int(rank)))


@rule("out-of-range", "error", words=tuple(RANGES), source="torch, AdamW; PEFT, LoraConfig")
def out_of_range(view: View, facts: Facts) -> Iterator[Finding]:
    """A value that no run can use, such as 0 epochs, or that is far from all usual ones."""
    other = {
        "num_train_epochs": (view.number("max_steps") or 0) > 0 or view.value("do_train") is False,
        "weight_decay": "adam" not in str(view.value("optim", "adamw")),  # Lion's decay is larger: arXiv:2302.06675
        "lora_r": not view.is_on("use_peft"),  # some programs turn the adapter off by a rank of 0
        "lora_alpha": not view.is_on("use_peft") or view.tool == "llama-factory",  # there 0 is twice the rank
    }
    for word, (holds, text, why, usual, level) in RANGES.items():
        value: Any = found.value if (found := view.found(word)) else None
        if is_number(value) and value != -1 and not holds(value) and not other.get(word):  # -1 is "not set" in many programs
            what = f"{view.spelled(word)} is {value:g}; usable values are {text}."
            both = view.spelled(word).endswith("betas")  # one key for two words
            yield Finding(word, what, why, view.line(word, [0.9, 0.999] if both else usual), level)
