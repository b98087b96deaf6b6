"""The launchers' files: the YAML of `accelerate config`, and the JSON of DeepSpeed.

https://huggingface.co/docs/accelerate/package_reference/cli, https://www.deepspeed.ai/docs/config-json/
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from hwopt.configs.readers.draft import Draft
from hwopt.configs.source_file import Entry, SourceFile
from hwopt.configs.view import View
from hwopt.configs.words import names

ACCELERATE_SIGNATURE = names(
    """
    compute_environment distributed_type mixed_precision num_processes num_machines machine_rank
    main_training_function deepspeed_config fsdp_config dynamo_config use_cpu downcast_bf16 rdzv_backend same_network
    gpu_ids
    """
)
ACCELERATE_TELLING = frozenset({"compute_environment", "distributed_type", "machine_rank", "main_training_function"})
ACCELERATE_KEYS = {
    "num_processes": "num_processes",
    "num_machines": "num_machines",
    "mixed_precision": "mixed_precision",
    "use_cpu": "use_cpu",
    "distributed_type": "distributed_type",
    "deepspeed_config.zero_stage": "zero_stage",
    "deepspeed_config.gradient_accumulation_steps": "gradient_accumulation_steps",
    "deepspeed_config.gradient_clipping": "max_grad_norm",
    "deepspeed_config.deepspeed_config_file": "deepspeed",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
}
ACCELERATE_REASONS = {
    "compute_environment": "hwopt runs on this machine; docs/clusters.md has launchers",
    "debug": "a check of the launcher itself",
    "main_training_function": "hwopt has its own",
    "machine_rank": "the launcher's command line says it",
    "rdzv_backend": "the launcher's own",
    "same_network": "the launcher's own",
    "main_process_port": "the launcher's own",
    "main_process_ip": "the launcher's own",
    "gpu_ids": "CUDA_VISIBLE_DEVICES chooses the cards",
    "downcast_bf16": "for TPUs",
}

DEEPSPEED_SIGNATURE = names(
    """
    train_batch_size train_micro_batch_size_per_gpu zero_optimization zero_allow_untested_optimizer gradient_clipping
    steps_per_print wall_clock_breakdown bf16 fp16 activation_checkpointing optimizer scheduler comms_logger
    """
)
DEEPSPEED_TELLING = frozenset({"zero_optimization", "train_micro_batch_size_per_gpu", "zero_allow_untested_optimizer"})
DEEPSPEED_KEYS = {
    "train_batch_size": "effective_batch_size",
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "fp16.enabled": "fp16",
    "bf16.enabled": "bf16",
    "zero_optimization.stage": "zero_stage",
    "optimizer.type": "optim",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_num_steps": "warmup_steps",
}
OPTIMIZERS = {"adamw": "adamw_torch", "adam": "adamw_torch"}
OFF = (None, "none", "None", False)


def read_accelerate(source: SourceFile, recognised_by: str) -> View:
    draft = Draft(source)
    offloads = {"deepspeed_config.offload_optimizer_device": "optimizer", "deepspeed_config.offload_param_device": "parameters"}
    for entry in source.entries:
        if entry.value == "auto":
            draft.leave(entry, "the arguments of the trainer say it", "other")
        elif entry.key in ACCELERATE_KEYS:
            draft.add(ACCELERATE_KEYS[entry.key], entry)
        elif entry.key.split(".")[0] in ACCELERATE_REASONS or entry.path[0].startswith("tpu_"):
            draft.leave(entry, ACCELERATE_REASONS.get(entry.path[0], "for TPUs"), "other")
        elif entry.key not in offloads:
            draft.leave(entry, "a key of the launcher without a counterpart")
    add_offload(draft, offloads)
    if "fsdp_config" in source.top and "zero_stage" not in draft.settings:
        kind = next((entry for entry in source.entries if entry.key == "distributed_type"), None)
        if kind is not None and kind.value == "FSDP":
            draft.add("fsdp", kind)
    return draft.view("accelerate", recognised_by, partial(spelled, ACCELERATE_KEYS))


def read_deepspeed(source: SourceFile, recognised_by: str) -> View:
    draft = Draft(source)
    offloads = {
        "zero_optimization.offload_optimizer.device": "optimizer",
        "zero_optimization.offload_param.device": "parameters",
    }
    for entry in source.entries:
        if entry.value == "auto":
            draft.leave(entry, "the arguments of the trainer say it", "other")
        elif entry.key == "optimizer.type":
            draft.add("optim", entry, OPTIMIZERS.get(str(entry.value).lower(), entry.value))
        elif entry.key == "optimizer.params.betas" and isinstance(entry.value, list) and len(entry.value) == 2:
            for word, value in zip(("adam_beta1", "adam_beta2"), entry.value, strict=True):
                draft.add(word, entry, value)
        elif entry.key in DEEPSPEED_KEYS:
            draft.add(DEEPSPEED_KEYS[entry.key], entry)
        elif entry.key not in offloads:
            draft.leave(entry, "a key of DeepSpeed without a counterpart; hwopt sets its engine by the plan")
    add_offload(draft, offloads)
    return draft.view("deepspeed", recognised_by, partial(spelled, DEEPSPEED_KEYS))


def add_offload(draft: Draft, offloads: Mapping[str, str]) -> None:
    """`zero_offload` from the devices that the file names; that of the parameters includes that of the optimizer."""
    found: dict[str, Entry] = {}
    for entry in draft.source.entries:
        if entry.key in offloads:
            if entry.value in OFF:
                draft.leave(entry, "nothing is offloaded", "other")
            else:
                found[offloads[entry.key]] = entry
    if "parameters" in found:
        draft.add("zero_offload", found["parameters"], "parameters")
        if "optimizer" in found:
            draft.leave(found["optimizer"], "offloaded with the parameters", "other")
    elif "optimizer" in found:
        draft.add("zero_offload", found["optimizer"], "optimizer")


def spelled(keys: Mapping[str, str], word: str) -> str:
    """The key for `word` by a table of keys; `word` itself if there is none."""
    return next((key for key, found in keys.items() if found == word), word)
