"""Settings that are wrong together, or that do something else than they seem to: one entry for each mistake."""

from __future__ import annotations

from operator import not_
from typing import Any

from hwopt.configs.check.contract import TRAINERS, TRANSFORMERS, combination
from hwopt.configs.view import is_number

FLASH = ("flash_attention_2", "flash_attention_3")
REENTRANT = "gradient_checkpointing_kwargs.use_reentrant"


def positive(value: Any) -> bool:
    return is_number(value) and value > 0


def is_half(value: Any) -> bool:
    return str(value).removeprefix("torch.") in ("float16", "fp16", "half")


COMBINATIONS = (
    combination(
        "batch-power-of-two",
        "information",
        {"per_device_train_batch_size": lambda rows: positive(rows) and int(rows) & (int(rows) - 1) != 0},
        "{per_device_train_batch_size} is not a power of 2.",
        "No change is needed: tensor cores want hidden sizes and token counts in multiples of 8, not batches in powers of 2.",
        source="notes.md#rtx-3070-64-rows: power of 2 is better",
    ),
    combination(
        "batch-search",
        "warning",
        {"auto_find_batch_size": True},
        "{auto_find_batch_size} lowers the batch after an out-of-memory error, and not the accumulation.",
        "The rows of a step then depend on the card's free memory: two runs of one file differ.",
        source="transformers, auto_find_batch_size",
        fix={"auto_find_batch_size": False},
        tools=TRANSFORMERS,
    ),
    combination(
        "fp16-and-bf16",
        "error",
        {"bf16": True, "fp16": True},
        "fp16 and bf16 are both true.",
        "The trainer stops: a run has one of the two.",
        source="transformers, TrainingArguments: at most one of both",
        fix={"fp16": False},
    ),
    combination(
        "bits-twice",
        "error",
        {"load_in_8bit": True, "load_in_4bit": True},
        "{load_in_8bit} and {load_in_4bit} are both true.",
        "transformers stops: weights are quantized to one of the two.",
        source="transformers, BitsAndBytesConfig; axolotl, schemas/peft.py",
        fix={"load_in_8bit": False},
        tools=TRAINERS,
    ),
    combination(
        "apex-level",
        "warning",
        {"fp16_opt_level": bool},
        "{fp16_opt_level} belongs to NVIDIA Apex and has no effect with torch's native AMP.",
        "The weights stay in fp32 under autocast (O1). Version 5 of transformers has no such name.",
        source="transformers, fp16_opt_level; notes.md#rtx-3070-64-rows",
        fix='remove {fp16_opt_level}; a hwopt profile has level = "O2" for half-precision weights',
        tools=TRANSFORMERS,
    ),
    combination(
        "fp16-weights",
        "error",
        {"torch_dtype": is_half, "fp16": True, "use_peft": not_},
        "{torch_dtype} is fp16 beside {fp16} = true.",
        'The first update stops with "Attempting to unscale FP16 gradients": loss scaling needs fp32 weights.',
        source="torch, GradScaler: Attempting to unscale FP16 gradients",
        fix={"torch_dtype": "float32"},
        tools=TRAINERS,
    ),
    combination(
        "cache-checkpointing",
        "warning",
        {"use_cache": True, "gradient_checkpointing": True},
        "{use_cache} is true with activation checkpointing.",
        "Most models turn the cache off with a message; others keep it, which costs memory. Training needs none.",
        source="transformers: use_cache is incompatible with gradient checkpointing",
        fix={"use_cache": False},
        tools=TRAINERS,
    ),
    combination(
        "unused-checkpointing",
        "warning",
        {"ddp_find_unused_parameters": True, "gradient_checkpointing": True, REENTRANT: lambda value: value is not False},
        "{ddp_find_unused_parameters} is true with reentrant checkpointing (the default of transformers 4).",
        'On several ranks the first backward pass stops: "Expected to mark a variable ready only once".',
        source="transformers#4659; torch, DistributedDataParallel and reentrant checkpointing",
        fix={"ddp_find_unused_parameters": False},
        tools=TRAINERS,
    ),
    combination(
        "dora-dropout",
        "information",
        {"lora_dropout": positive, "use_dora": True},
        "{lora_dropout} is not 0 with DoRA.",
        "PEFT has a faster path without dropout (+29 % samples per second); DoRA takes 1.2 to 2 times as long as LoRA.",
        source="PEFT, DoRA: a faster path without dropout",
        fix={"lora_dropout": 0},
    ),
    combination(
        "compile-widths",
        "warning",
        {"torch_compile": True, "packing": not_},
        "torch.compile compiles again for each new width of a batch.",
        "At the recompile limit of 8 torch runs in eager mode, silently. The mode reduce-overhead records graphs again.",
        source="pytorch#188150; recompile limit of 8",
        fix="pad to a few fixed widths, as a hwopt profile does",
        tools=TRAINERS,
    ),
    combination(
        "compile-graphs",
        "error",
        {
            "torch_compile": True,
            "torch_compile_mode": lambda mode: mode in ("reduce-overhead", "max-autotune"),
            "gradient_accumulation_steps": lambda steps: isinstance(steps, int) and steps > 1,
        },
        "{torch_compile_mode} records CUDA graphs, and a step has several micro-batches.",
        "The next micro-batch overwrites the outputs of a graph: the backward pass fails, or gradients are wrong.",
        source="pytorch#169545, pytorch#96693",
        fix={"torch_compile_mode": "default"},
        tools=TRAINERS,
    ),
    combination(
        "length-groups",
        "information",
        {"group_by_length": True},
        "Samples of similar length share a batch.",
        "The order of the samples changes, and the loss moves in waves. hwopt's length batching keeps the order.",
        source="transformers#20810",
        tools=TRAINERS,
    ),
    combination(
        "pin-without-workers",
        "information",
        {"dataloader_pin_memory": True, "dataloader_num_workers": lambda number: number == 0},
        "{dataloader_pin_memory} is true with 0 workers.",
        "The training process then copies each batch into pinned memory itself, between two steps.",
        source="torch, memory pinning",
        fix={"dataloader_num_workers": 2},
    ),
    combination(
        "prefetch-without-workers",
        "error",
        {"dataloader_prefetch_factor": is_number, "dataloader_num_workers": not_},
        "{dataloader_prefetch_factor} is given without workers.",
        "The trainer stops: only workers prefetch, and the default is 0 workers.",
        source="torch, DataLoader: prefetch_factor needs workers",
        fix={"dataloader_num_workers": 2},
        tools=TRAINERS,
    ),
    combination(
        "persistent-without-workers",
        "error",
        {"dataloader_persistent_workers": True, "dataloader_num_workers": not_},
        "{dataloader_persistent_workers} is true without workers.",
        "The data loader stops: it has no worker to keep.",
        source="torch, DataLoader: persistent_workers needs workers",
        fix={"dataloader_num_workers": 2},
        tools=TRAINERS,
    ),
    combination(
        "workers-restarted",
        "information",
        {"dataloader_persistent_workers": False, "dataloader_num_workers": lambda number: number != 0},
        "{dataloader_persistent_workers} is false.",
        "Each epoch starts new worker processes, which costs seconds. Turning it off makes no step faster.",
        source="notes.md#rtx-3070-64-rows: disable persistent workers",
        fix={"dataloader_persistent_workers": True},
    ),
    combination(
        "warmup-twice",
        "warning",
        {"warmup_ratio": positive, "warmup_steps": positive},
        "{warmup_ratio} is given beside {warmup_steps}.",
        "The steps count, and the ratio has no effect.",
        source="transformers: warmup_steps overrides warmup_ratio",
        fix="remove {warmup_ratio}",
    ),
    combination(
        "steps-and-epochs",
        "information",
        {"num_train_epochs": is_number, "max_steps": positive},
        "{num_train_epochs} is given beside {max_steps}.",
        "The run ends after the steps; the epochs have no effect.",
        source="transformers: max_steps overrides num_train_epochs",
        fix="remove {num_train_epochs}",
    ),
    combination(
        "nonfinite-filter",
        "information",
        {"logging_nan_inf_filter": True},
        "{logging_nan_inf_filter} is true.",
        "A loss that is NaN or infinite is logged as the mean of the others, so that a broken run looks sound.",
        source="transformers, logging_nan_inf_filter",
        fix={"logging_nan_inf_filter": False},
    ),
    combination(
        "cpu-ranks",
        "error",
        {
            "num_processes": lambda number: is_number(number) and number > 1,
            "use_cpu": True,
            "distributed_type": lambda kind: kind in ("NO", "MULTI_CPU", None),
        },
        "{use_cpu} is true with several processes.",
        "Without mpirun the launcher starts one process, without a warning. MULTI_GPU starts CPU ranks too.",
        source="accelerate launch --cpu: one process, without a warning",
        fix={"distributed_type": "MULTI_GPU"},
        tools=("accelerate",),
    ),
)
