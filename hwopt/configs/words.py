"""The vocabulary that all tools share: the names of TrainingArguments, some that it lacks, and further names of single tools.

Names of TrainingArguments: version 5.23 of transformers, and all that version 4 had. Which version removed a name: its release
notes and https://github.com/huggingface/transformers/blob/main/src/transformers/training_args.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
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
    packing padding_free trust_remote_code pure_bf16 do_train do_eval do_predict full_determinism ignore_data_skip
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
SCHEDULES = names("""
    linear cosine cosine_with_restarts polynomial constant constant_with_warmup inverse_sqrt reduce_lr_on_plateau
    cosine_with_min_lr cosine_warmup_with_min_lr warmup_stable_decay greedy
""")
TASK_TYPES = names("SEQ_CLS SEQ_2_SEQ_LM CAUSAL_LM TOKEN_CLS QUESTION_ANS FEATURE_EXTRACTION")
INTERVALS = names("no steps epoch")
VALUES = {
    "optim": OPTIMIZERS, "lr_scheduler_type": SCHEDULES, "eval_strategy": INTERVALS, "logging_strategy": INTERVALS,
    "save_strategy": INTERVALS | {"best"},
    "attn_implementation": names("eager sdpa flash_attention_2 flash_attention_3 flash_attention_4 flex_attention"),
    "torch_compile_mode": names("default reduce-overhead max-autotune max-autotune-no-cudagraphs"),
    "report_to": names("all none azure_ml clearml codecarbon comet_ml dagshub dvclive flyte kubeflow mlflow neptune swanlab "
        "tensorboard trackio wandb"),
    "packing_strategy": names("bfd bfd_split wrapped"), "vllm_mode": names("server colocate"),
    "pref_loss": names("sigmoid hinge ipo kto_pair orpo simpo"), "LoraConfig.bias": names("none all lora_only"),
    **dict.fromkeys(("LoraConfig.task_type", "lora_task_type"), TASK_TYPES | {each.lower() for each in TASK_TYPES}),
    **{f"{table}bnb_4bit_quant_type": names("nf4 fp4") for table in ("", "BitsAndBytesConfig.")},
}
"""Word -> its values in transformers 5, TRL, PEFT, bitsandbytes and LLaMA-Factory. TaskType.CAUSAL_LM is read as causal_lm."""
USUAL = names("attn_implementation torch_compile_mode report_to packing_strategy vllm_mode scheduler.type pref_loss")
"""Words of which only the usual values are listed."""
ZERO_DEVICES = {f"zero_optimization.offload_{part}.device": names("none cpu nvme") for part in ("param", "optimizer")}
SCHEDULERS_OF_DEEPSPEED = names("LRRangeTest OneCycle WarmupLR WarmupDecayLR WarmupCosineLR")
VALUES_OF = {"deepspeed": {**ZERO_DEVICES, "scheduler.type": SCHEDULERS_OF_DEEPSPEED}, "accelerate": {
    "mixed_precision": names("no fp16 bf16 fp8"),
    "fsdp_config.fsdp_sharding_strategy": names("FULL_SHARD SHARD_GRAD_OP NO_SHARD HYBRID_SHARD HYBRID_SHARD_ZERO2 1 2 3 4 5"),
    "fsdp_config.fsdp_auto_wrap_policy": names("TRANSFORMER_BASED_WRAP SIZE_BASED_WRAP NO_WRAP"),
    "fsdp_config.fsdp_state_dict_type": names("FULL_STATE_DICT LOCAL_STATE_DICT SHARDED_STATE_DICT 1 2 3"),
    "fsdp_config.fsdp_backward_prefetch": names("BACKWARD_PRE BACKWARD_POST NO_PREFETCH 1 2"),
}}
"""Tool -> key -> its values, those of accelerate in any case."""
MODULES = names("""
    q_proj k_proj v_proj o_proj out_proj qkv_proj gate_proj up_proj down_proj gate_up_proj in_proj query_key_value dense
    dense_h_to_4h dense_4h_to_h query key value query_proj key_proj value_proj c_attn c_proj c_fc fc1 fc2 fc_in fc_out q_lin
    k_lin v_lin out_lin lin1 lin2 ff_proj ff_out all-linear embed_tokens lm_head
""")
"""Names of linear layers in models of transformers, for adapters."""
FAMILIES = {
    "llama2": r"llama-?2", "llama3": r"llama-?3", "llama4": r"llama-?4", "qwen": r"qwen|qwq", "gemma": r"gemma",
    "mistral": r"mi[sx]tral", "phi": r"phi-?\d", "glm": r"glm",
}
"""How the templates of LLaMA-Factory for a family of models begin -> how the names of its models look."""
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

TRL_RENAMED = {
    "max_seq_length": "max_length",
    "torch_dtype": "dtype",
    "use_liger": "use_liger_kernel",
    "use_liger_loss": "use_liger_kernel",
    "vllm_max_model_len": "vllm_max_model_length",
    **dict.fromkeys(
        names("""max_prompt_length vllm_device vllm_dtype label_pad_token_id is_encoder_decoder generate_during_eval
        rpo_alpha reference_free ref_model_init_kwargs force_use_ref_model use_num_logits_to_keep"""),
        "",
    ),
}
RENAMED = {**TRL_RENAMED, "tokenizer": "processing_class"}
"""Keyword that classes of TRL and transformers had -> the present one; "" if there is none."""
GONE = {
    "load_in_4bit": "quantization_config=BitsAndBytesConfig(load_in_4bit=True)",
    "load_in_8bit": "quantization_config=BitsAndBytesConfig(load_in_8bit=True)",
    "use_flash_attention_2": 'attn_implementation="flash_attention_2"',
    "use_auth_token": "token",
}
"""Keyword of a model's from_pretrained that transformers 5 no longer has -> the present one."""

ARGUMENTS = INTEGERS | NUMBERS | FLAGS | OTHER_ARGUMENTS
OWN = names("""
    task text_blocks train_file validation_file test_file train_on_inputs effective_batch_size effective_tokens eval_fraction
    max_train_samples num_processes num_machines zero_offload zero_stage roles_to_train messages_column
""")
"""Words that are no names of TrainingArguments: other programs have names like these."""
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


# fmt: off
FURTHER = {
    "axolotl": names("""
    activation_offloading adam_beta3 adam_epsilon2 attn_implementation batch_flattening chat_template_kwargs
    chunked_cross_entropy context_parallel_size cosine_constant_lr_ratio cosine_min_lr_ratio cut_cross_entropy
    dataset_num_proc ddp deepcompile device device_map dpo_label_smoothing dpo_loss_type dpo_loss_weights dpo_padding_free
    dpo_use_liger_kernel dpo_use_weighting eot_tokens excess_length_strategy flash_attn_cross_entropy flash_attn_fuse_mlp
    flash_attn_fuse_qkv fp8 fsdp_version gc_steps liger_cross_entropy liger_layer_norm liger_rms_norm liger_rms_norm_gated
    liger_rope liger_swiglu lora_mlp_kernel lora_model_dir lora_o_kernel lora_qkv_kernel lora_target_parameters
    loraplus_lr_ratio low_cpu_mem_usage max_memory max_prompt_len model_config model_kwargs model_revision model_type
    num_labels pad_to_multiple_of pad_to_sequence_len peft peft_layers_pattern plugins precompute_ref_log_probs
    pretraining_dataset relora reward_model rl rl_beta save_safetensors sequence_parallel_degree special_tokens streaming
    tensor_parallel_size tokenizer_type tokenizer_use_fast tokens use_eaft trl unfrozen_parameters use_kernels sage_attention
    """),
    # it stops at unknown keys and names them: only those that are words of another tool too
    "llama-factory": names("batch_size max_length overwrite_output_dir use_liger_kernel"),
    "deepspeed": names("""
    activation_checkpointing aio amp autotuning bf16 checkpoint comet comms_logger communication_data_type compile
    compression_training csv_monitor curriculum_learning data_efficiency data_types dataloader_drop_last disable_allgather
    dump_state elasticity flops_profiler fp16 gradient_allreduce_op gradient_predivide_factor graph_harvesting hybrid_engine
    log_level memory_breakdown nebula optimizer pipeline prescale_gradients scheduler seq_parallel_communication_data_type
    sequence_parallel_size sparse_attention sparse_gradients steps_per_print tensor_parallel tensorboard timers torch_autocast
    use_data_before_expert_parallelism wall_clock_breakdown wandb weight_quantization zero_force_ds_cpu_optimizer
    """),
}
"""Tool -> keys that it has besides those in `dialects` and `launchers`, for the rule about misspelled names.

axolotl: https://docs.axolotl.ai/docs/config-reference.html and its integrations; https://www.deepspeed.ai/docs/config-json/
"""
ZERO_KEYS = names("""
    stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce allgather_partitions
    allgather_bucket_size overlap_comm compute_grad_norm load_from_fp32_weights elastic_checkpoint offload_param
    offload_optimizer zenflow sub_group_size cpu_offload_param cpu_offload_use_pin_memory cpu_offload
    stage3_prefetch_bucket_size stage3_param_persistence_threshold stage3_model_persistence_threshold
    stage3_max_live_parameters stage3_max_reuse_distance stage3_gather_16bit_weights_on_model_save
    stage3_module_granularity_threshold stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential
    stage3_gather_fp16_weights_on_model_save ignore_unused_parameters legacy_stage1 round_robin_gradients
    parameter_alignment zero_hpz_partition_size zero_quantized_weights zero_quantized_nontrainable_weights
    zero_quantized_gradients memory_efficient_linear pipeline_loading_checkpoint override_module_apply
    log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory leaf_module
    device nvme_path buffer_count buffer_size max_in_cpu pin_memory pipeline_read pipeline_write fast_init ratio
""")
ZERO_KEYS |= {name.removeprefix("stage3_") for name in ZERO_KEYS}  # DeepSpeed takes both
"""Keys of zero_optimization, and of the tables for offloading in it."""
GONE_FROM_AXOLOTL = {
    "max_packed_sequence_len": "sample_packing with sequence_len", "rope_scaling": "rope_scaling in overrides_of_model_config",
    "noisy_embedding_alpha": "neftune_noise_alpha", "dpo_beta": "rl_beta", "evaluation_strategy": "eval_strategy",
    "eval_table_size": "num_generation_samples with generate_samples", "eval_max_new_tokens": "generation_max_new_tokens",
    **dict.fromkeys(
        names("dpo_use_logits_to_keep dpo_generate_during_eval dpo_norm_loss rpo_alpha s2_attention flash_attn_rms_norm"), ""),
    **{f"unsloth_lora_{part}": f"lora_{part}_kernel" for part in ("mlp", "qkv", "o")},
    **dict.fromkeys(names("unsloth_cross_entropy_loss unsloth_rms_norm unsloth_rope"), ""),
}
# fmt: on
FORMER: Mapping[str, Mapping[str, Former]] = {
    "axolotl": {name: Former(instead, "") for name, instead in GONE_FROM_AXOLOTL.items()},
    "llama-factory": {name: each for name, each in FORMER_NAMES.items() if each.gone != "5"},
    "transformers": FORMER_NAMES,
}
"""Tool -> the names that it no longer has. LLaMA-Factory chooses its version of transformers itself, 4 or 5."""
