"""Further keys that a tool has, for rules about misspelled and former names. `dialects` and `launchers` have those that are read.

axolotl: https://docs.axolotl.ai/docs/config-reference.html, and the arguments of its integrations
LLaMA-Factory: https://github.com/hiyouga/LLaMA-Factory/tree/main/src/llamafactory/hparams
DeepSpeed: https://www.deepspeed.ai/docs/config-json/
"""

from __future__ import annotations

from collections.abc import Mapping

from hwopt.configs.view import Tool
from hwopt.configs.words import FORMER_NAMES, Former, names

AXOLOTL = """
    activation_offloading adam_beta3 adam_epsilon2 added_tokens_overrides attn_implementation auto_resume_from_checkpoints
    base_model_config batch_flattening bench_dataset bench_split bfloat16 bnb_config_kwargs center_rewards_coefficient
    chat_template_kwargs chunked_cross_entropy chunked_cross_entropy_num_chunks cls_model_config
    comet_api_key comet_experiment_config comet_experiment_key comet_mode comet_online comet_project_name comet_workspace
    context_parallel_size cosine_constant_lr_ratio cosine_min_lr_ratio cpo_alpha curriculum_sampling cut_cross_entropy
    dataset_exact_deduplication dataset_keep_in_memory dataset_num_proc dataset_shard_idx dataset_shard_num ddp deepcompile
    default_system_message device device_map dion_lr dion_momentum dion_rank_fraction dion_rank_multiple_of do_bench_eval
    do_causal_lm_eval dp_replicate_size dp_shard_size dpo_label_smoothing dpo_loss_type dpo_loss_weights dpo_padding_free
    dpo_use_liger_kernel dpo_use_weighting dynamic_checkpoint eaft_alpha eaft_k ebft embedding_lr embedding_lr_scale
    embeddings_skip_upcast eot_tokens eval_causal_lm_metrics eval_sequence_len excess_length_strategy
    experimental_skip_move_to_device experts_implementation fix_untrained_tokens flash_attn_cross_entropy flash_attn_fuse_mlp
    flash_attn_fuse_qkv flash_optimum flex_attn_compile_kwargs float16 float32 fp8 fp8_enable_fsdp_float8_all_gather
    freeze_mm_modules fsdp_final_state_dict_type fsdp_version gc_steps gemma4_hybrid_attn_impl generate_samples
    generation_do_sample generation_max_new_tokens generation_prompt_ratio generation_temperature generation_top_k
    generation_top_p gptq gpu_memory_limit gradio_max_new_tokens gradio_server_name gradio_server_port gradio_share
    gradio_temperature gradio_title grokfast_alpha grokfast_lamb heads_k_stride hf_mlflow_log_artifacts hf_use_auth_token
    image_resize_algorithm image_size include_tkps include_tokens_per_second is_falcon_derived_model is_llama_derived_model
    is_mistral_derived_model is_qwen_derived_model jagged_restart_anneal_steps jagged_restart_steps jagged_restart_warmup_steps
    kto_desirable_weight kto_undesirable_weight layer_offloading liger_cross_entropy liger_glu_activation liger_layer_norm
    liger_rms_norm liger_rms_norm_gated liger_rope liger_swiglu liger_use_token_scaling lisa_layers_attribute lisa_n_layers
    lisa_step_interval llama4_linearized_experts llmcompressor lora_embedding_kernel lora_fan_in_fan_out lora_mlp_kernel
    lora_model_dir lora_o_kernel lora_on_cpu lora_qkv_kernel lora_target_parameters loraplus_lr_embedding loraplus_lr_ratio
    low_cpu_mem_usage lr_div_factor lr_groups lr_quadratic_warmup max_memory max_prompt_len mean_resizing_embeddings merge_lora
    merge_method min_sample_len mlflow_experiment_name mlflow_run_name mlflow_tracking_uri model_config model_kwargs
    model_quantization_config model_quantization_config_kwargs model_revision model_type multipack_real_batches
    num_dataset_shards_to_save num_generation_samples num_labels orpo_alpha otel_metrics_host otel_metrics_port
    overrides_of_model_config overrides_of_model_kwargs pad_to_multiple_of pad_to_sequence_len peft peft_autocast_adapter_dtype
    peft_ensure_weight_tying peft_layer_replication peft_layers_pattern peft_trainable_token_indices plugins pose_max_context_len
    pose_num_chunks pose_split_on_token_ids precompute_ref_log_probs preprocess_iterable pretrain_multipack_attn
    pretrain_multipack_buffer_size pretraining_dataset pretraining_sample_concatenation process_reward_model processor_type
    profiler_steps profiler_steps_start push_dataset_to_hub qat qlora_sharded_model_loading quantization quantize_moe_experts
    ray_num_workers ray_run_name reinit_weights relora relora_cpu_offload relora_prune_method relora_prune_ratio relora_steps
    relora_warmup_steps resize_token_embeddings_to_32x resources_per_worker reward_model ring_attn_func rl rl_beta sage_attention
    sample_packing_bin_size sample_packing_eff_est sample_packing_group_size sample_packing_mp_start_method
    sample_packing_sequentially save_compressed save_safetensors scaling_softmax scaling_softmax_bias scaling_softmax_factor
    sequence_parallel_degree shrink_embeddings shuffle_before_merging_datasets shuffle_merged_datasets simpo_gamma
    skip_prepare_dataset special_tokens spectrum_model_name spectrum_top_fraction streaming streaming_multipack_buffer_size
    tensor_parallel_size tiled_mlp tiled_mlp_num_shards tiled_mlp_use_original_mlp tokenizer_legacy tokenizer_save_jinja_files
    tokenizer_type tokenizer_use_fast tokenizer_use_mistral_common tokens torchdistx_path trainer_cls trl type_of_model
    unfrozen_parameters unsloth_cross_entropy_loss unsloth_lora_mlp unsloth_lora_o unsloth_lora_qkv unsloth_rms_norm unsloth_rope
    use_comet use_eaft use_kernels use_mlflow use_otel_metrics use_pose use_ray use_tensorboard use_wandb vllm wandb_entity
    wandb_log_model wandb_mode wandb_name wandb_project wandb_run_id wandb_watch world_size
"""
LLAMA_FACTORY = """
    adapter_folder adapter_name_or_path add_special_tokens add_tokens apollo_layerwise apollo_proj apollo_proj_type apollo_rank
    apollo_scale apollo_scale_front apollo_scale_type apollo_target apollo_update_interval audio_sampling_rate badam_mask_mode
    badam_mode badam_start_block badam_switch_interval badam_switch_mode badam_update_ratio badam_verbose batch_size buffer_size
    cache_dir chunk_size compute_accuracy cpu_infer create_new_adapter crop_to_patches disable_gradient_checkpointing
    disable_shuffling do_sample download_mode dpo_label_smoothing eval_num_beams eval_on_each_dataset export_device export_dir
    export_hub_model_id export_legacy_format export_quantization_bit export_quantization_dataset export_quantization_maxlen
    export_quantization_nsamples export_size fp8 fp8_backend fp8_enable_fsdp_float8_all_gather freeze_extra_modules
    freeze_language_model freeze_multi_modal_projector freeze_trainable_layers freeze_trainable_modules freeze_vision_tower
    galore_layerwise galore_proj_type galore_rank galore_scale galore_target galore_update_interval generation_config
    generation_max_length generation_num_beams hf_hub_token ignore_pad_token_for_loss image_do_pan_and_scan image_max_pixels
    image_min_pixels include_effective_tokens_per_second infer_backend infer_dtype init_special_tokens interleave_probs
    kt_force_think kt_maxlen kt_mode kt_optimize_rule kt_use_cuda_graph kto_chosen_weight kto_rejected_weight lang ld_alpha
    length_penalty loraplus_lr_embedding loraplus_lr_ratio low_cpu_mem_usage mask_history max_length max_new_tokens media_dir
    mix_strategy mixture_of_depths mode module_dropout moe_aux_loss_coef ms_hub_token n_shot neat_packing
    new_special_tokens_config num_beams offload_folder oft_block_size oft_rank oft_target om_hub_token overwrite_output_dir
    pissa_convert pissa_iter placement_strategy ppo_buffer_size ppo_epochs ppo_score_norm ppo_target ppo_whiten_rewards
    predict_with_generate pref_bco_weight pref_beta pref_ftx pref_loss preprocessing_batch_size print_param_status
    quantization_device_map quantization_method quantization_type ray_init_kwargs ray_num_workers ray_run_name
    ray_storage_filesystem ray_storage_path ref_model ref_model_adapters ref_model_quantization_bit repetition_penalty
    resize_vocab resources_per_worker reward_model reward_model_adapters reward_model_quantization_bit reward_model_type
    rope_scaling save_dir sglang_config sglang_lora_backend sglang_maxlen sglang_mem_fraction sglang_tp_size shift_attn
    simpo_gamma skip_special_tokens sortish_sampler split_special_tokens streaming swanlab_api_key swanlab_lark_secret
    swanlab_lark_webhook_url swanlab_logdir swanlab_mode swanlab_project swanlab_run_name swanlab_workspace system_message task
    task_dir temperature tokenized_path tool_format top_k top_p train_from_scratch train_on_prompt upcast_layernorm
    upcast_lmhead_output use_adam_mini use_apollo use_audio_in_video use_badam use_dft_loss use_fast_tokenizer use_galore use_kt
    use_kv_cache use_liger_kernel use_llama_pro use_mca use_muon use_reentrant_gc use_swanlab use_unsloth use_unsloth_gc
    use_v1_kernels video_fps video_max_pixels video_maxlen video_min_pixels vllm_config vllm_enforce_eager vllm_gpu_util
    vllm_max_lora_rank vllm_maxlen
"""
DEEPSPEED = """
    activation_checkpointing aio amp autotuning bf16 checkpoint comet comms_logger communication_data_type compile
    compression_training csv_monitor curriculum_learning data_efficiency data_types dataloader_drop_last disable_allgather
    dump_state elasticity flops_profiler fp16 gradient_allreduce_op gradient_predivide_factor graph_harvesting hybrid_engine
    log_level memory_breakdown nebula optimizer pipeline prescale_gradients scheduler seq_parallel_communication_data_type
    sequence_parallel_size sparse_attention sparse_gradients steps_per_print tensor_parallel tensorboard timers torch_autocast
    use_data_before_expert_parallelism wall_clock_breakdown wandb weight_quantization zero_force_ds_cpu_optimizer
"""
FURTHER: Mapping[Tool, frozenset[str]] = {
    "axolotl": names(AXOLOTL),
    "llama-factory": names(LLAMA_FACTORY),
    "deepspeed": names(DEEPSPEED),
}
FORMER: Mapping[Tool, Mapping[str, Former]] = {
    "axolotl": {
        "max_packed_sequence_len": Former("sample_packing with sequence_len", ""),
        "rope_scaling": Former("rope_scaling in overrides_of_model_config", ""),
        "noisy_embedding_alpha": Former("neftune_noise_alpha", ""),
        "dpo_beta": Former("rl_beta", ""),
        "evaluation_strategy": Former("eval_strategy", ""),
        "eval_table_size": Former("num_generation_samples with generate_samples", ""),
        "eval_max_new_tokens": Former("generation_max_new_tokens", ""),
        **dict.fromkeys(
            names("dpo_use_logits_to_keep dpo_generate_during_eval dpo_norm_loss rpo_alpha s2_attention flash_attn_rms_norm"),
            Former("", ""),
        ),
    },
    "llama-factory": {name: each for name, each in FORMER_NAMES.items() if each.gone != "5"},
    "transformers": FORMER_NAMES,
}
"""Tool -> the names that it no longer has. LLaMA-Factory chooses its version of transformers itself, 4 or 5."""
