"""The keys of accelerate and DeepSpeed.

https://huggingface.co/docs/accelerate/package_reference/cli
https://www.deepspeed.ai/docs/config-json/
"""

from __future__ import annotations

from hwopt.configs.dialect import NOTHING, Dialect, Special
from hwopt.configs.source_file import Entry
from hwopt.configs.view import View
from hwopt.configs.words import names


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


OWN = "the launcher's own"
SECTION = "deepspeed_config"
ACCELERATE = Dialect(
    "accelerate",
    names("compute_environment distributed_type machine_rank main_training_function"),
    {
        **{word: word for word in names("num_processes num_machines mixed_precision use_cpu distributed_type")},
        "gradient_accumulation_steps": "gradient_accumulation_steps",
        f"{SECTION}.zero_stage": "zero_stage",
        f"{SECTION}.gradient_accumulation_steps": "gradient_accumulation_steps",
        f"{SECTION}.gradient_clipping": "max_grad_norm",
        f"{SECTION}.deepspeed_config_file": "deepspeed",
        f"{SECTION}.offload_param_device": offload("parameters"),
        f"{SECTION}.offload_optimizer_device": offload("optimizer", f"{SECTION}.offload_param_device"),
    },
    {
        "compute_environment": "hwopt runs on this machine; docs/clusters.md has launchers",
        "debug": "a check of the launcher itself",
        "main_training_function": "hwopt has its own",
        "machine_rank": "the launcher's command line says it",
        **dict.fromkeys(("rdzv_backend", "same_network", "main_process_port", "main_process_ip"), OWN),
        "gpu_ids": "CUDA_VISIBLE_DEVICES chooses the cards",
        **dict.fromkeys(("downcast_bf16", "tpu_env", "tpu_use_cluster", "tpu_use_sudo"), "for TPUs"),
    },
    "a key of the launcher without a counterpart",
    finish=fsdp,
)


def betas(view: View, entry: Entry) -> None:
    if isinstance(entry.value, list) and len(entry.value) == 2:
        for word, value in zip(("adam_beta1", "adam_beta2"), entry.value, strict=True):
            view.add(word, entry, value)
    else:
        view.leave(entry, "expected two numbers", "unreadable")


ZERO = "zero_optimization"
ADAMW = dict.fromkeys(("AdamW", "Adam", "adamw", "adam"), "adamw_torch")
SCHEDULERS = {"WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
DEEPSPEED = Dialect(
    "deepspeed",
    names("zero_optimization train_micro_batch_size_per_gpu zero_allow_untested_optimizer bf16.enabled fp16.enabled"),
    {
        "train_batch_size": "effective_batch_size",
        "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
        "gradient_accumulation_steps": "gradient_accumulation_steps",
        "gradient_clipping": "max_grad_norm",
        "fp16.enabled": "fp16",
        "bf16.enabled": "bf16",
        f"{ZERO}.stage": "zero_stage",
        "optimizer.type": ("optim", ADAMW),
        "optimizer.params.lr": "learning_rate",
        "optimizer.params.eps": "adam_epsilon",
        "optimizer.params.weight_decay": "weight_decay",
        "scheduler.type": ("lr_scheduler_type", SCHEDULERS),
        "scheduler.params.warmup_num_steps": "warmup_steps",
        "optimizer.params.betas": betas,
        f"{ZERO}.offload_param.device": offload("parameters"),
        f"{ZERO}.offload_optimizer.device": offload("optimizer", f"{ZERO}.offload_param.device"),
    },
    {},
    "a key of DeepSpeed without a counterpart; hwopt sets its engine by the plan",
)
