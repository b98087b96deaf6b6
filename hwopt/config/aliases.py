"""Words of TrainingArguments and of common scripts, and the key of a job or the option of the command line to give instead.

Plugins declare the words for their own options (`Plugin.aliases`). Messages and the readers of `hwopt.configs` use both.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import redirect_stdout, suppress
from functools import cache
from importlib import metadata

SYNONYMS = {
    name: word
    for word, others in {
        "per_device_train_batch_size": "batch_size train_batch_size micro_batch_size per_gpu_train_batch_size",
        "per_device_eval_batch_size": "eval_batch_size per_gpu_eval_batch_size val_batch_size",
        "gradient_accumulation_steps": "grad_accum gradient_accumulation accumulate_grad_batches",
        "learning_rate": "lr",
        "num_train_epochs": "epochs num_epochs n_epochs max_epochs",
        "optim": "optimizer optimizer_name optimizer.name optim.name",
        "lr_scheduler_type": "scheduler lr_scheduler scheduler.name",
        "max_grad_norm": "gradient_clipping clip_grad_norm clip_norm grad_clip gradient_clip_val",
        "dataloader_num_workers": "num_workers workers",
        "dataloader_pin_memory": "pin_memory",
        "dataloader_prefetch_factor": "prefetch_factor",
        "dataloader_persistent_workers": "persistent_workers",
        "torch_compile": "use_torch_compile compile",
        "gradient_checkpointing": "use_gradient_checkpointing activation_checkpointing",
        "gradient_checkpointing_kwargs.use_reentrant": "activation_checkpointing_kwargs.use_reentrant",
        "max_length": "max_seq_length max_seq_len max_len block_size model_max_length cutoff_len",
        "eval_strategy": "evaluation_strategy",
        "label_smoothing_factor": "label_smoothing",
        "torch_dtype": "dtype torch_dtype_str",
        "model_name_or_path": "model_name pretrained_model_name_or_path",
        "model_revision": "revision",
        "train_file": "dataset_name train_path",
        "validation_file": "eval_file eval_path val_file",
        "text_column": "text_column_name dataset_text_field",
        "label_column": "label_column_name",
        "use_cpu": "no_cuda",
        "bnb_4bit_use_double_quant": "use_bnb_nested_quant",
        "lora_r": "lora_rank peft_config.r LoraConfig.r get_peft_model.r",
        "warmup_steps": "num_warmup_steps",
        "lora_target_modules": "peft_config.target_modules LoraConfig.target_modules get_peft_model.target_modules",
    }.items()
    for name in others.split()
}
"""A name of common scripts, or a former name -> the word of TrainingArguments for the same thing."""

INSTEAD = {
    # options of the command line
    "output_dir": "--output-dir",
    "run_name": "--name",
    "resume_from_checkpoint": "--resume, or --resume-from CHECKPOINT",
    "overwrite_output_dir": "--fresh",
    "trust_remote_code": "--trust-remote-code MODEL_NAME",
    "use_cpu": "--profile cpu",
    # keys of a job
    "model_name_or_path": "model.name",
    "tokenizer_name": "model.tokenizer",
    "model_revision": "model.revision",
    "train_file": "data.train",
    "validation_file": "data.eval",
    "test_file": "data.test",
    "dataset_train_split": "data.split",
    "dataset_test_split": "data.eval_split",
    "eos_token": "data.eos_token",
    "chat_template_path": "data.chat_template",
    "text_column": "data.text",
    "label_column": "data.label",
    "messages_column": "data.messages",
    "assistant_turns": "data.assistant_turns",
    "prompt_column": "data.prompt",
    "completion_column": "data.completion",
    "max_length": "data.max_length",
    "text_blocks": "data.blocks",
    "max_train_samples": "data.max_rows",
    "eval_fraction": "data.eval_fraction",
    "task": "task.kind",
    "label_smoothing_factor": "task.label_smoothing",
    # words for messages alone, which no configuration of another tool has with the same meaning
    "dataset": "data.train",
    "data_files": "data.train, a glob or a list of files",
    "dataset_config": 'data.train = "NAME:CONFIGURATION"',
    "dataset_config_name": 'data.train = "NAME:CONFIGURATION"',
    "config_name": 'data.train = "NAME:CONFIGURATION"',
    "configuration": 'data.train = "NAME:CONFIGURATION"',
    "mixture": "data.train = [{ path = …, weight = … }, …]",
    "datasets": "data.train = [{ path = …, weight = … }, …]",
    "probabilities": "data.train = [{ path = …, weight = … }, …]",
    "max_eval_samples": "data.max_rows",
    "max_samples": "data.max_rows",
    "steps": "training.max_steps",
    "eval_strategy": "training.eval_steps (default: at the end of each epoch)",
    "save_strategy": "training.save_steps or training.save_minutes",
    "logging_strategy": "training.logging_steps (a number of steps)",
    "load_best_model_at_end": "training.metric_for_best_model (the best model is always what final/ holds)",
}
"""Word -> the option of the command line or the key of a job to give instead."""

PLUGIN_GROUP = "hwopt.plugins"


@cache
def plugin_aliases() -> Mapping[str, str]:
    """Word -> "plugins.NAME.OPTION", as the installed plugins declare it. Called for messages only: it imports them all."""
    found: dict[str, str] = {}
    for entry_point in sorted(metadata.entry_points(group=PLUGIN_GROUP), key=lambda each: each.name):
        with suppress(Exception, SystemExit), redirect_stdout(sys.stderr):  # a broken plugin declares none
            for word, option in entry_point.load().aliases.items():
                found.setdefault(str(word), f"plugins.{entry_point.name}.{option}")
    return found


def plugin_of(word: str) -> str:
    """The name of the plugin that has an option for the argument `word`."""
    return plugin_aliases()[word].split(".")[1]


def instead_of(name: str) -> str:
    """The key to give for a `name` that is unknown in its table; "" for an unknown name."""
    word = SYNONYMS.get(name, name)
    if found := INSTEAD.get(name) or INSTEAD.get(word):
        return found
    if option := plugin_aliases().get(name) or plugin_aliases().get(word):
        return f"{option} (in a profile, or with --set)"
    return f"training.{word}" if word != name else ""


def job_key(word: str) -> tuple[str, str] | None:
    """The table and the key of a job that have the same values as `word`; None without one."""
    table, _, key = INSTEAD.get(word, "").partition(".")
    return (table, key) if key.isidentifier() else None


def option_for(word: str) -> str:
    """The plugin option that an installed plugin declares for `word`, to be named in a message; `word` itself if none does."""
    aliases = plugin_aliases()
    return aliases.get(word) or aliases.get(SYNONYMS.get(word, word), word)
