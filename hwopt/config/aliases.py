"""Words of transformers' TrainingArguments and of common scripts that are no keys here, and what to give instead.

Only read where a key is unknown, so that a word of a newer plugin that is missing here costs no more than a hint.
"""

from __future__ import annotations

INSTEAD = {
    # what the command line says
    "output_dir": "--output-dir",
    "run_name": "--name",
    "resume_from_checkpoint": "--resume, or --resume-from CHECKPOINT",
    "overwrite_output_dir": "--fresh",
    "trust_remote_code": "--trust-remote-code MODEL_NAME",
    "use_cpu": "--profile cpu",
    "no_cuda": "--profile cpu",
    # what a job says in other words
    "model_name": "model.name",
    "model_name_or_path": "model.name",
    "pretrained_model_name_or_path": "model.name",
    "tokenizer_name": "model.tokenizer",
    "train_file": "data.train",
    "train_path": "data.train",
    "dataset": "data.train",
    "dataset_name": "data.train",
    "eval_file": "data.eval",
    "validation_file": "data.eval",
    "eval_path": "data.eval",
    "text_column": "data.text",
    "text_column_name": "data.text",
    "label_column": "data.label",
    "label_column_name": "data.label",
    "max_seq_length": "data.max_length",
    "max_seq_len": "data.max_length",
    "block_size": "data.max_length",
    "task": "task.kind",
    "lr": "training.learning_rate",
    "epochs": "training.num_train_epochs",
    "num_epochs": "training.num_train_epochs",
    "steps": "training.max_steps",
    "scheduler": "training.lr_scheduler_type",
    "gradient_clipping": "training.max_grad_norm",
    "eval_strategy": "training.eval_steps (default: at the end of each epoch)",
    "evaluation_strategy": "training.eval_steps (default: at the end of each epoch)",
    "save_strategy": "training.save_steps or training.save_minutes",
    "logging_strategy": "training.logging_steps",
    "load_best_model_at_end": "training.metric_for_best_model (the best model is always what final/ holds)",
    # what plugins do
    "fp16": "plugins.precision.dtype = 'fp16'",
    "bf16": "plugins.precision.dtype = 'bf16'",
    "mixed_precision": "plugins.precision.dtype",
    "torch_dtype": "plugins.precision.dtype",
    "fp16_opt_level": "plugins.precision.level",
    "tf32": "plugins.tf32.enabled = true",
    "batch_size": "plugins.batch.train",
    "train_batch_size": "plugins.batch.train",
    "eval_batch_size": "plugins.batch.eval",
    "per_device_train_batch_size": "plugins.batch.train",
    "per_device_eval_batch_size": "plugins.batch.eval",
    "gradient_accumulation_steps": "plugins.batch.accumulation",
    "auto_find_batch_size": "plugins.batch.train = 'auto'",
    "gradient_checkpointing": "plugins.checkpointing.layers = 'all'",
    "optim": "plugins.optimizer.name",
    "optimizer": "plugins.optimizer.name",
    "torch_compile": "plugins.compile.enabled = true",
    "torch_compile_mode": "plugins.compile.mode",
    "attn_implementation": "plugins.sdpa.prefer",
    "group_by_length": "plugins.group_lengths.enabled = true",
    "dataloader_num_workers": "plugins.dataloader.workers",
    "num_workers": "plugins.dataloader.workers",
    "dataloader_pin_memory": "plugins.dataloader.pin_memory",
    "dataloader_prefetch_factor": "plugins.dataloader.prefetch_factor",
    "dataloader_persistent_workers": "plugins.dataloader.persistent_workers",
    "load_in_4bit": "plugins.quantize.enabled = true",
    "load_in_8bit": "plugins.quantize.enabled = true",
    "quantization_config": "plugins.quantize.enabled = true",
    "deepspeed": "plugins.zero.enabled = true",
    "fsdp": "plugins.fsdp.enabled = true",
}


def instead_of(word: str) -> str:
    """What to give for a `word` that is no key where it stands; "" where nobody knows."""
    found = INSTEAD.get(word, "")
    if found.startswith("plugins."):
        return f"{found} (in a profile, or with --set)"
    return found
