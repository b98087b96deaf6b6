"""Settings that are wrong together, or that do something else than they seem to, and values out of range: an entry for each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from operator import is_not, not_
from typing import Any, NamedTuple

from hwopt.configs.check import TRAINERS, TRANSFORMERS, Facts, Finding, Level, Rule, Tools, rule
from hwopt.configs.launchers import NOTHING
from hwopt.configs.view import TOOL_NAMES, View, is_number
from hwopt.text import truncate

FLASH = ("flash_attention_2", "flash_attention_3")
REENTRANT = "gradient_checkpointing_kwargs.use_reentrant"


def positive(value: Any) -> bool:
    return is_number(value) and value > 0


def several(value: Any) -> bool:
    return is_number(value) and value > 1


def given(value: Any) -> bool:
    return value not in (*NOTHING, "", "no", [], {})


def in_graphs(mode: Any) -> bool:
    return mode in ("reduce-overhead", "max-autotune")


def fraction(value: Any) -> bool:
    return is_number(value) and 0 <= value < 1


def keyed(text: str, spelled: Callable[[str], str]) -> str:
    """`text` with each word in braces as its key."""
    return re.sub(r"\{([\w.]+)\}", lambda found: spelled(found[1]), text)


def combination(
    name: str, level: Level, settings: Mapping[str, Any], what: str, why: str, *, source: str, fix: Any = "", tools: Tools = ()
) -> Rule:
    """A Rule about settings that are wrong together; the finding is about the first one.

    `settings`: word -> its value, or a function that tests the value (None: the file does not give it). A word in braces in
    `what` and `fix` is replaced by the key of the file. A mapping as `fix` gives settings to write.
    """
    word = next(iter(settings))

    def function(view: View, facts: Facts) -> Iterator[Finding]:
        if all(view.meets(each, expected) for each, expected in settings.items()):
            lines = keyed(fix, view.spelled) if isinstance(fix, str) else view.lines(fix)
            yield Finding(word, keyed(what, view.spelled), why, lines)

    return Rule(name, level, keyed(what, str), source, function, (word,), (), tools)


# the conditions of a rule on one line, then the mistake, its effect and the source
# fmt: off
COMBINATIONS = (
    combination("batch-power-of-two", "information",
        {"per_device_train_batch_size": lambda rows: positive(rows) and int(rows) & (int(rows) - 1) != 0},
        what="{per_device_train_batch_size} is not a power of 2.",
        why="No change is needed: tensor cores want hidden sizes and token counts in multiples of 8, not batches in powers of 2.",
        source="notes.md#rtx-3070-64-rows: power of 2 is better"),
    combination("batch-search", "warning", {"auto_find_batch_size": True}, tools=TRANSFORMERS,
        fix={"auto_find_batch_size": False},
        what="{auto_find_batch_size} lowers the batch after an out-of-memory error, and not the accumulation.",
        why="The rows of a step then depend on the card's free memory: two runs of one file differ.",
        source="transformers, auto_find_batch_size"),
    combination("apex-level", "warning", {"fp16_opt_level": bool}, tools=TRANSFORMERS,
        fix='remove {fp16_opt_level}; a hwopt profile has level = "O2" for half-precision weights',
        what="{fp16_opt_level} belongs to NVIDIA Apex and has no effect with torch's native AMP.",
        why="The weights stay in fp32 under autocast (O1). Version 5 of transformers has no such name.",
        source="transformers, fp16_opt_level; notes.md#rtx-3070-64-rows"),
    combination("fp16-weights", "error",
        {"torch_dtype": lambda dtype: re.fullmatch(r"(torch\.)?(float16|fp16|half)", str(dtype)), "fp16": True, "use_peft": not_},
        tools=TRAINERS, fix={"torch_dtype": "float32"},
        what="{torch_dtype} is fp16 beside {fp16} = true.",
        why='The first update stops with "Attempting to unscale FP16 gradients": loss scaling needs fp32 weights.',
        source="torch, GradScaler: Attempting to unscale FP16 gradients"),
    combination("cache-checkpointing", "warning", {"use_cache": True, "gradient_checkpointing": True}, tools=TRAINERS,
        fix={"use_cache": False},
        what="{use_cache} is true with activation checkpointing.",
        why="Most models turn the cache off with a message; others keep it, which costs memory. Training needs none.",
        source="transformers: use_cache is incompatible with gradient checkpointing"),
    combination("unused-checkpointing", "warning",
        {"ddp_find_unused_parameters": True, "gradient_checkpointing": True, REENTRANT: lambda value: value is not False,
         "model_name_or_path": lambda name: not re.search("(?i)gemma-?4", str(name))},  # for these axolotl turns it off
        tools=TRAINERS, fix={"ddp_find_unused_parameters": False},
        what="{ddp_find_unused_parameters} is true with reentrant checkpointing (the default of transformers 4).",
        why='On several ranks the first backward pass stops: "Expected to mark a variable ready only once".',
        source="transformers#4659; torch, DistributedDataParallel and reentrant checkpointing"),
    combination("dora-dropout", "information", {"lora_dropout": positive, "use_dora": True}, fix={"lora_dropout": 0},
        what="{lora_dropout} is not 0 with DoRA.",
        why="PEFT has a faster path without dropout (+29 % samples per second); DoRA takes 1.2 to 2 times as long as LoRA.",
        source="PEFT, DoRA: a faster path without dropout"),
    combination("compile-widths", "warning", {"torch_compile_mode": in_graphs, "packing": not_}, tools=TRAINERS,
        fix="pad to a few fixed widths, as a hwopt profile does, or use the mode default",
        what="{torch_compile_mode} records CUDA graphs again for each new width of a batch.",
        why="With batches padded to their longest sample nearly each step records a graph, which costs time and memory.",
        source="pytorch#188150"),
    combination("compile-graphs", "error",
        {"torch_compile": True, "torch_compile_mode": in_graphs, "gradient_accumulation_steps": several},
        tools=TRAINERS, fix={"torch_compile_mode": "default"},
        what="{torch_compile_mode} records CUDA graphs, and a step has several micro-batches.",
        why="The next micro-batch overwrites the outputs of a graph: the backward pass fails, or gradients are wrong.",
        source="pytorch#169545, pytorch#96693"),
    combination("pin-without-workers", "information",
        {"dataloader_pin_memory": True, "dataloader_num_workers": lambda number: number == 0}, fix={"dataloader_num_workers": 2},
        what="{dataloader_pin_memory} is true with 0 workers.",
        why="The training process then copies each batch into pinned memory itself, between two steps.",
        source="torch, memory pinning"),
    combination("workers-restarted", "information",
        {"dataloader_persistent_workers": False, "dataloader_num_workers": lambda number: number != 0},
        fix={"dataloader_persistent_workers": True},
        what="{dataloader_persistent_workers} is false.",
        why="Each epoch starts new worker processes, which costs seconds. Turning it off makes no step faster.",
        source="notes.md#rtx-3070-64-rows: disable persistent workers"),
    combination("warmup-twice", "warning", {"warmup_ratio": positive, "warmup_steps": positive}, tools=TRANSFORMERS,
        fix="remove {warmup_ratio}",
        what="{warmup_ratio} is given beside {warmup_steps}.",
        why="The steps count, and the ratio has no effect.",
        source="transformers: warmup_steps overrides warmup_ratio"),
    combination("steps-and-epochs", "information", {"num_train_epochs": is_number, "max_steps": positive},
        fix="remove {num_train_epochs}",
        what="{num_train_epochs} is given beside {max_steps}.",
        why="The run ends after the steps; the epochs have no effect.",
        source="transformers: max_steps overrides num_train_epochs"),
    combination("nonfinite-filter", "information", {"logging_nan_inf_filter": True}, fix={"logging_nan_inf_filter": False},
        what="{logging_nan_inf_filter} is true.",
        why="A loss that is NaN or infinite is logged as the mean of the others, so that a broken run looks sound.",
        source="transformers, logging_nan_inf_filter"),
)
STEPS, is_given = {"max_steps": lambda steps: not positive(steps)}, partial(is_not, None)
IN_DEEPSPEED = ("mixed_precision", "zero_stage", "zero_offload", "max_grad_norm", "gradient_accumulation_steps")
AXOLOTL: Tools = ("axolotl",)
FACTORY: Tools = ("llama-factory",)
REFUSED: tuple[tuple[Tools, Mapping[str, Any], Any], ...] = (
    ((), {"bf16": True, "fp16": True}, {"fp16": False}),
    (TRAINERS, {"fsdp": given, "deepspeed": given}, "remove {fsdp}"),
    (TRAINERS, {"load_in_8bit": True, "load_in_4bit": True}, {"load_in_8bit": False}),
    (TRAINERS, {"dataloader_prefetch_factor": is_number, "dataloader_num_workers": not_}, {"dataloader_num_workers": 2}),
    (TRAINERS, {"dataloader_persistent_workers": True, "dataloader_num_workers": not_}, {"dataloader_num_workers": 2}),
    (TRANSFORMERS, {"lr_scheduler_type": lambda kind: str(kind).endswith(("min_lr", "decay")), "lr_scheduler_kwargs": not_},
        "lr_scheduler_kwargs with min_lr_rate, or num_decay_steps for warmup_stable_decay"),
    *((("accelerate",), {word: is_given, "deepspeed": given}, f"remove {{{word}}}") for word in IN_DEEPSPEED),
    *((AXOLOTL, {f"{kind}_steps": positive, other: value}, f"remove {{{kind}_steps}}") for kind in ("save", "eval")
      for other, value in ((f"{kind}s_per_epoch", positive), (f"{kind}_strategy", lambda it: it and it != "steps"))),
    (AXOLOTL, {"warmup_steps": positive, "warmup_ratio": positive}, "remove {warmup_ratio}"),
    (AXOLOTL, {"rl": bool, "packing": True}, {"packing": False}),
    (AXOLOTL, {"eval_fraction": positive, "validation_file": bool}, {"eval_fraction": 0}),
    (AXOLOTL, {"pretraining_dataset": bool, **STEPS}, {"max_steps": 1000}),
    (AXOLOTL, {"lora_dropout": positive, "lora_target_parameters": bool}, {"lora_dropout": 0}),
    (AXOLOTL, {"tokens": bool, "use_peft": True, "modules_to_save": not_}, "lora_modules_to_save: [embed_tokens, lm_head]"),
    (FACTORY, {"streaming": True, **STEPS}, {"max_steps": 1000}),
    (FACTORY, {"eval_fraction": positive, "validation_file": bool}, "remove {eval_fraction}"),
    (FACTORY, {"do_eval": True, "eval_fraction": not_, "validation_file": not_}, {"eval_fraction": 0.1}),
    (FACTORY, {"init_lora_weights": "pissa", "load_in_4bit": True}, "remove {init_lora_weights}"),
    (FACTORY, {"resize_vocab": True, "load_in_4bit": True}, "remove {load_in_4bit}"),
    (FACTORY, {"predict_with_generate": True, "stage": bool}, "remove {predict_with_generate}"),
    *((FACTORY, {f"use_{name}": True, "deepspeed": given}, "remove {deepspeed}") for name in ("galore", "apollo")),
)
# fmt: on
"""Tools, settings that they refuse together, and what to write."""


def as_written(view: View, word: str) -> str:
    """The line of the file that sets `word`, shortened; "no …" without one."""
    if (found := view.found(word)) is None:
        return f"no {view.spelled(word)}"
    value = view.source.values.get(found.key, found.value)
    return view.line(word, value if isinstance(value, bool | int | float) else truncate(value))


@rule("refused-pair", "error", source="transformers, training_args.py; axolotl, schemas; LLaMA-Factory, parser.py; accelerate")
def refused_pair(view: View, facts: Facts) -> Iterator[Finding]:
    """Settings that the tool refuses together, such as fp16 and bf16, or save_steps and saves_per_epoch of axolotl."""
    for tools, settings, fix in REFUSED:
        if (not tools or view.tool in tools) and all(view.meets(word, expected) for word, expected in settings.items()):
            lines = " beside ".join(as_written(view, word) for word in settings)
            fix = keyed(fix, view.spelled) if isinstance(fix, str) else view.lines(fix)
            yield Finding(next(iter(settings)), f"{lines}.", f"{TOOL_NAMES[view.tool]} refuses them together, and stops.", fix)


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
