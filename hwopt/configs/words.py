"""The vocabulary that all tools share: the names of transformers' TrainingArguments, and some that it lacks.

Names of TrainingArguments: version 5.23 of transformers, and all that version 4 had. Which version removed a name: its release
notes and https://github.com/huggingface/transformers/blob/main/src/transformers/training_args.py.
"""

from __future__ import annotations

import re
from math import isfinite
from typing import Any, NamedTuple

from hwopt.config.aliases import SYNONYMS
from hwopt.text import truncate


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# fmt: off
INTEGERS = names("""
    per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps effective_batch_size effective_tokens
    max_steps save_total_limit dataloader_num_workers dataloader_prefetch_factor seed data_seed eval_accumulation_steps lora_r
    lora_alpha max_length max_train_samples zero_stage num_processes num_machines early_stopping_patience
""")
NUMBERS = names("""
    num_train_epochs learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm warmup_ratio
    warmup_steps eval_steps save_steps logging_steps label_smoothing_factor neftune_noise_alpha lora_dropout
    eval_fraction early_stopping_threshold
""")
FLAGS = names("""
    fp16 bf16 tf32 fp16_full_eval bf16_full_eval gradient_checkpointing gradient_checkpointing_kwargs.use_reentrant
    torch_compile dataloader_pin_memory dataloader_persistent_workers dataloader_drop_last group_by_length
    auto_find_batch_size load_best_model_at_end greater_is_better push_to_hub hub_private_repo use_cpu
    logging_nan_inf_filter use_liger_kernel load_in_4bit load_in_8bit bnb_4bit_use_double_quant use_peft use_dora use_rslora
    packing trust_remote_code pure_bf16 do_train do_eval do_predict full_determinism ignore_data_skip
    prediction_loss_only remove_unused_columns text_blocks assistant_only_loss train_on_inputs
""")
OTHER_ARGUMENTS = names("""
    output_dir run_name optim lr_scheduler_type eval_strategy save_strategy logging_strategy fp16_opt_level
    torch_dtype mixed_precision attn_implementation model_name_or_path tokenizer_name model_revision train_file
    validation_file test_file text_column label_column metric_for_best_model hub_model_id torch_compile_mode
    torch_compile_backend report_to deepspeed fsdp bnb_4bit_compute_dtype lora_target_modules zero_offload task
    modules_to_save layers_to_transform init_lora_weights roles_to_train
    dataset_train_split dataset_test_split eos_token chat_template_path dataset_num_proc packing_strategy eval_packing
    resume_from_checkpoint train_sampling_strategy adapter messages_column prompt_column completion_column
    distributed_type lr_scheduler_kwargs optim_args optim_target_modules average_tokens_across_devices assistant_turns
    activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing_kwargs liger_kernel_config use_cache
    torch_empty_cache_steps logging_first_step log_on_each_node include_num_input_tokens_seen log_level
    log_level_replica disable_tqdm project trackio_space_id trackio_bucket_id trackio_static_space_id eval_delay
    eval_on_start eval_do_concat_batches eval_use_gather_object include_for_metrics batch_eval_metrics save_only_model
    save_on_each_node enable_jit_checkpoint hub_token hub_strategy hub_always_push hub_revision
    restore_callback_states_from_checkpoint accelerator_config parallelism_config dataloader_multiprocessing_context
    dataloader_in_order label_names length_column_name ddp_find_unused_parameters ddp_bucket_cap_mb
    ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout fsdp_config debug skip_memory_metrics local_rank
""")
"""Words whose values are texts, tables, or read by no rule."""
OPTIMIZERS = names("""
    adafactor adagrad adalomo adamw_8bit adamw_anyprecision adamw_bnb_8bit adamw_torch adamw_torch_4bit
    adamw_torch_8bit adamw_torch_fused adamw_torch_npu_fused adamw_torch_xla ademamix ademamix_8bit apollo_adamw
    apollo_adamw_layerwise galore_adafactor galore_adafactor_layerwise galore_adamw galore_adamw_8bit galore_adamw_8bit_layerwise
    galore_adamw_layerwise grokadamw lion_32bit lion_8bit lomo paged_adamw_32bit paged_adamw_8bit paged_ademamix_32bit
    paged_ademamix_8bit paged_lion_32bit paged_lion_8bit rmsprop rmsprop_bnb rmsprop_bnb_32bit rmsprop_bnb_8bit
    schedule_free_adamw schedule_free_radam schedule_free_sgd sgd stable_adamw
""")
"""Values of `optim` in transformers 5."""
REMOVED = """
    fp16_backend half_precision_backend overwrite_output_dir save_safetensors tpu_num_cores tpu_metrics_debug
    past_index ray_scope jit_mode_eval use_ipex use_mps_device use_legacy_prediction_loop mp_parameters
"""
RENAMED_ARGUMENTS = {
    "5": {
        "per_gpu_train_batch_size": "per_device_train_batch_size", "per_gpu_eval_batch_size": "per_device_eval_batch_size",
        "no_cuda": "use_cpu", "torchdynamo": "torch_compile_backend", "push_to_hub_token": "hub_token",
        "push_to_hub_model_id": "hub_model_id", "push_to_hub_organization": "hub_model_id",
        "include_inputs_for_metrics": "include_for_metrics", "include_tokens_per_second": "include_num_input_tokens_seen",
        "warmup_ratio": "warmup_steps with a value below 1", "adafactor": 'optim with the value "adafactor"',
        "group_by_length": 'train_sampling_strategy with the value "group_by_length"',
        "logging_dir": "the environment variable TENSORBOARD_LOGGING_DIR",
        "fsdp_min_num_params": "min_num_params in fsdp_config",
        "fsdp_transformer_layer_cls_to_wrap": "transformer_layer_cls_to_wrap in fsdp_config",
        **dict.fromkeys(REMOVED.split(), ""),
    },
    "4.46": {
        "evaluation_strategy": "eval_strategy", "dispatch_batches": "dispatch_batches in accelerator_config",
        "split_batches": "split_batches in accelerator_config",
    },
    "4.34": {"sharded_ddp": "fsdp", "xpu_backend": "ddp_backend"},
}
"""The version of transformers without the names -> name -> what to write; "" if nothing replaces it."""
# fmt: on


class Former(NamedTuple):
    """A name that TrainingArguments no longer has, or will not have."""

    instead: str
    gone: str


FORMER_NAMES = {name: Former(new, gone) for gone, names in RENAMED_ARGUMENTS.items() for name, new in names.items()}
DEPRECATED_NAMES = {f"gradient_checkpointing{end}": Former(f"activation_checkpointing{end}", "6") for end in ("", "_kwargs")}
"""Names that transformers 5 has under another name too."""

ARGUMENTS = INTEGERS | NUMBERS | FLAGS | OTHER_ARGUMENTS
SCHEDULE_OPTIONS = "lr_scheduler_kwargs"
"""The word with the options of the schedule, of which a file may give each by itself."""
FLAG_TEXTS = dict.fromkeys(("true", "yes", "on", "1", "unsloth"), True) | dict.fromkeys(("false", "no", "off", "0"), False)
LEADING_NUMBER = re.compile(r"\s*[-+]?\d[\d_.]*(?:[eE][-+]?\d+)?")


class NotReadable(ValueError):
    """The value has another type than its word. `guess`: the number that a text begins with, or None."""

    def __init__(self, reason: str, guess: int | float | None = None) -> None:
        super().__init__(reason)
        self.guess = guess


def word_of(name: str) -> str | None:
    """The word for the key `name` of TrainingArguments or of a common script; None if there is none."""
    if name in SYNONYMS:
        return SYNONYMS[name]
    return name if name in ARGUMENTS or name in FORMER_NAMES or name.startswith(f"{SCHEDULE_OPTIONS}.") else None


def typed(word: str, value: Any) -> Any:
    """`value` in the type of `word`: "2e-5" as a number, "yes" as true. "auto" and null stay.

    Raises NotReadable if the text is none of them.
    """
    if value in ("auto", "Auto"):
        return value
    if value in (None, "none", "null", ""):
        return None
    if word in INTEGERS | NUMBERS:
        return number(word, value)
    if word in FLAGS:
        if (text := str(value).lower()) not in FLAG_TEXTS:
            raise NotReadable(f"expected true or false, got {truncate(value)}")
        return FLAG_TEXTS[text]
    return value


def number(word: str, value: Any) -> int | float:
    if isinstance(value, str):
        found = LEADING_NUMBER.match(value)
        if found is not None and found.end() == len(value.rstrip()):
            value = float(value.replace("_", ""))
        elif found is not None and word in INTEGERS:
            guess = number(word, found[0].strip())
            raise NotReadable(f'expected a number, got {truncate(value)}. A YAML comment begins with " #".', guess)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise NotReadable(f"expected a number, got {truncate(value)}")
    if isinstance(value, float) and not isfinite(value):
        raise NotReadable(f"expected a finite number, got {value:g}")
    if word in INTEGERS and value != int(value):
        raise NotReadable(f"expected a whole number, got {value:g}")
    return int(value) if word in INTEGERS else value
