"""Dialect: how a tool spells the settings that all tools share. And the keys of accelerate and DeepSpeed.

https://huggingface.co/docs/accelerate/package_reference/cli
https://www.deepspeed.ai/docs/config-json/
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hwopt.configs.source_file import Entry, SourceFile
from hwopt.configs.view import Omitted, Tool, View
from hwopt.configs.words import names, word_of

Values = Mapping[Any, Any]
Special = Callable[[View, Entry], None]
NOTHING = (None, "none", "None", False)
"""Values of a key that is not set."""


@dataclass(frozen=True)
class Dialect:
    """The keys of a tool that have other names or other values than in TrainingArguments."""

    tool: Tool
    telling: frozenset[str]
    """Keys of the outermost table that no other tool has. One of them decides."""
    keys: Mapping[str, str | tuple[str, Values] | Special]
    """Key -> its word; its word and the values that mean something else there; or a function that reads it."""
    reasons: Mapping[str, str]
    """Key, or the table that it is in -> why it is left out."""
    unknown: str
    """Why other keys are left out."""
    arguments: bool = False
    """Whether the names of TrainingArguments are keys of the tool too."""
    finish: Callable[[View], None] = lambda view: None
    """Called after the last entry."""

    def read(self, source: SourceFile, recognised_by: str) -> View:
        view = View(source, self.tool, recognised_by, self.spelling)
        for entry in source.entries:
            self.take(view, entry)
        self.finish(view)
        return view

    def take(self, view: View, entry: Entry) -> None:
        found = self.keys.get(entry.key) or (word_of(entry.key) if self.arguments else None)
        if entry.value == "auto" and not self.arguments:
            view.leave(entry, "the arguments of the trainer say it", "other")
        elif callable(found):
            found(view, entry)
        elif found is None:
            empty = "has no value" if entry.value is None else ""
            reason = self.reasons.get(entry.key) or self.reasons.get(entry.path[0]) or empty
            view.leave(entry, reason or self.unknown, "other" if reason else "unknown")
        else:
            word, meant = (found, {}) if isinstance(found, str) else found
            value = entry.value if isinstance(entry.value, list | dict) else meant.get(entry.value, entry.value)
            if isinstance(value, Omitted):
                view.leave(entry, *value)
            else:
                view.add(word, entry, value)

    def spelling(self, word: str) -> str:
        return next((key for key, found in self.keys.items() if found == word), word)


def offload(what: str, by: str = "") -> Special:
    """`zero_offload` from the device of the entry; the parameters (device in `by`) include the optimizer."""

    def take(view: View, entry: Entry) -> None:
        given = {each.key for each in view.source.entries if each.value not in NOTHING}
        if entry.key not in given:
            view.leave(entry, "nothing is offloaded", "other")
        elif by in given:
            view.leave(entry, "offloaded with the parameters", "other")
        else:
            view.add("zero_offload", entry, what)

    return take


def fsdp(view: View) -> None:
    kind = view.settings.get("distributed_type")
    if kind is not None and kind.value == "FSDP" and "fsdp_config" in view.source.top:
        view.imply("fsdp", "FSDP", kind)


SECTION = "deepspeed_config"
# fmt: off
ACCELERATE = Dialect("accelerate", names("compute_environment distributed_type machine_rank main_training_function"), {
        **{word: word for word in names("num_processes num_machines mixed_precision use_cpu distributed_type")},
        "gradient_accumulation_steps": "gradient_accumulation_steps",
        f"{SECTION}.gradient_accumulation_steps": "gradient_accumulation_steps",
        f"{SECTION}.zero_stage": "zero_stage", f"{SECTION}.gradient_clipping": "max_grad_norm",
        f"{SECTION}.deepspeed_config_file": "deepspeed", f"{SECTION}.offload_param_device": offload("parameters"),
        f"{SECTION}.offload_optimizer_device": offload("optimizer", f"{SECTION}.offload_param_device"),
    }, {
        "compute_environment": "hwopt runs on this machine; docs/clusters.md has launchers",
        "debug": "a check of the launcher itself", "main_training_function": "hwopt has its own",
        "machine_rank": "the launcher's command line says it", "gpu_ids": "CUDA_VISIBLE_DEVICES chooses the cards",
        **dict.fromkeys(names("rdzv_backend same_network main_process_port main_process_ip"), "the launcher's own"),
        **dict.fromkeys(names("downcast_bf16 tpu_env tpu_use_cluster tpu_use_sudo"), "for TPUs"),
    }, "a key of the launcher without a counterpart", finish=fsdp)
# fmt: on


def betas(view: View, entry: Entry) -> None:
    if isinstance(entry.value, list) and len(entry.value) == 2:
        for word, value in zip(("adam_beta1", "adam_beta2"), entry.value, strict=True):
            view.add(word, entry, value)
    else:
        view.leave(entry, "expected two numbers", "unreadable")


ZERO = "zero_optimization"
ADAMW = dict.fromkeys(("AdamW", "Adam", "adamw", "adam"), "adamw_torch")
SCHEDULERS = {"WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
# fmt: off
DEEPSPEED = Dialect("deepspeed",
    names("zero_optimization train_micro_batch_size_per_gpu zero_allow_untested_optimizer bf16.enabled fp16.enabled"), {
        "train_batch_size": "effective_batch_size", "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
        "gradient_accumulation_steps": "gradient_accumulation_steps", "gradient_clipping": "max_grad_norm",
        "fp16.enabled": "fp16", "bf16.enabled": "bf16", f"{ZERO}.stage": "zero_stage",
        "optimizer.type": ("optim", ADAMW), "optimizer.params.lr": "learning_rate", "optimizer.params.betas": betas,
        "optimizer.params.eps": "adam_epsilon", "optimizer.params.weight_decay": "weight_decay",
        "scheduler.type": ("lr_scheduler_type", SCHEDULERS), "scheduler.params.warmup_num_steps": "warmup_steps",
        "scheduler.params.total_num_steps": "max_steps",
        f"{ZERO}.offload_param.device": offload("parameters"),
        f"{ZERO}.offload_optimizer.device": offload("optimizer", f"{ZERO}.offload_param.device"),
    }, {}, "a key of DeepSpeed without a counterpart; hwopt sets its engine by the plan")
# fmt: on
