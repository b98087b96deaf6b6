"""Each rule: a file that breaks it, with the line and the fix, and one that does not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hwopt.configs.check.checker import CheckReport, check, check_file, installed_rules
from hwopt.configs.check.contract import Facts
from hwopt.configs.check.facts import Given
from hwopt.configs.recognise import read_source, view_of
from hwopt.configs.words import OPTIMIZERS
from hwopt.planning.inputs import Inputs

INPUTS = Inputs()


class Case(NamedTuple):
    rule: str
    line: int
    """Of the finding in `broken`."""
    fix: str
    """A part of the fix."""
    broken: str
    fine: str
    suffix: str
    level: str
    given: dict[str, Any]


TABLE = """
eval-batch | 2 | per_device_eval_batch_size: 32
  per_device_train_batch_size: 16 / per_device_eval_batch_size: 192
  per_device_train_batch_size: 16 / per_device_eval_batch_size: 64
step-rows-small | 2 | gradient_accumulation_steps: 4 | rows=20000
  per_device_train_batch_size: 16 / gradient_accumulation_steps: 1
  per_device_train_batch_size: 16 / gradient_accumulation_steps: 4
step-rows-small | 2 | gradient_accumulation_steps: 2
  per_device_train_batch_size: 16 / gradient_accumulation_steps: 1
  per_device_train_batch_size: 16 / gradient_accumulation_steps: 1 / packing: true
step-rows-changed | 1 | per_device_train_batch_size: 32 and gradient_accumulation_steps: 4
  per_device_train_batch_size: 48  # instead of 64 / gradient_accumulation_steps: 3   # instead of 2
  per_device_train_batch_size: 32  # instead of 64 / gradient_accumulation_steps: 4   # instead of 2
step-rows-changed | 3 | gradient_accumulation_steps: 2
  per_device_train_batch_size: 32 / gradient_accumulation_steps: 3 / per_device_train_batch_size: 48
  per_device_train_batch_size: 32 / gradient_accumulation_steps: 3 / per_device_train_batch_size: 48 / \
gradient_accumulation_steps: 2
step-rows-contradict | 1 | "train_batch_size": 64 | suffix=.json
  {"train_batch_size": 100, / "train_micro_batch_size_per_gpu": 16, "gradient_accumulation_steps": 4}
  {"train_batch_size": 128, / "train_micro_batch_size_per_gpu": 16, "gradient_accumulation_steps": 4}
step-rows-small | 3 | gradient_accumulation_steps: 16
  base_model: m / micro_batch_size: 2 / gradient_accumulation_steps: 1
  base_model: m / micro_batch_size: 2 / gradient_accumulation_steps: 1 / deepspeed: zero3.json
optimizer-name | 1 | optim: adamw_torch_fused | level=error
  optim: adamw_torch_fusd / output_dir: o
  optim: paged_adamw_8bit / output_dir: o
batch-search | 1 | auto_find_batch_size: false
  auto_find_batch_size: true
  auto_find_batch_size: false
batch-power-of-two | 2 |  | level=information
  training: /   per_device_train_batch_size: 80
  training: /   per_device_train_batch_size: 64
learning-rate | 1 | learning_rate: 3e-05
  learning_rate: 2e-3 / per_device_train_batch_size: 32
  learning_rate: 2e-5 / per_device_train_batch_size: 32
worst-model | 2 | greater_is_better: false
  metric_for_best_model: eval_loss / greater_is_better: true
  metric_for_best_model: eval_f1 / greater_is_better: true
worst-model | 6 | training.greater_is_better = true | suffix=.toml
  [model] / name = "m" / [data] / train = "t" / [training] / greater_is_better = false / metric_for_best_model = "accuracy"
  [model] / name = "m" / [data] / train = "t" / [training] / metric_for_best_model = "perplexity"
worst-model | 1 | greater_is_better: false
  metric_for_best_model: wer / output_dir: o
  metric_for_best_model: score / output_dir: o
early-stopping | 2 | eval_strategy='epoch' | suffix=.py
  args = TrainingArguments("o", metric_for_best_model="f1") / stop = EarlyStoppingCallback()
  args = TrainingArguments("o", **rest) / stop = EarlyStoppingCallback()
early-stopping | 2 | load_best_model_at_end=True | suffix=.py
  args = TrainingArguments("o", eval_strategy="epoch") / stop = EarlyStoppingCallback(3)
  args = TrainingArguments("o", eval_strategy="epoch") / from mine import EarlyStoppingCallback / stop = EarlyStoppingCallback(3)
early-stopping | 3 | load_best_model_at_end: true | level=warning
  cutoff_len: 8 / eval_strategy: epoch / early_stopping_steps: 2 / metric_for_best_model: loss
  early_stopping_patience: 2 / eval_strategy: epoch / metric_for_best_model: loss
warmup-ignored | 2 | lr_scheduler_type: constant_with_warmup
  lr_scheduler_type: constant / warmup_steps: 500
  lr_scheduler_type: constant / warmup_steps: 0
warmup-ignored | 3 | lr_scheduler: constant_with_warmup
  base_model: m / lr_scheduler: constant / warmup_ratio: 0.1
  base_model: m / lr_scheduler: cosine / warmup_ratio: 0.1
out-of-range | 1 | num_train_epochs: 3
  num_train_epochs: 0
  num_train_epochs: 0 / max_steps: 10
out-of-range | 1 | weight_decay: 0.01 | level=warning
  weight_decay: 10 / optim: adamw_torch
  weight_decay: 10 / optim: lion_32bit
out-of-range | 6 | training.learning_rate = 2e-05 | suffix=.toml
  [model] / name = "m" / [data] / train = "t" / [training] / learning_rate = 5.0
  [model] / name = "m" / [data] / train = "t" / [training] / learning_rate = 0.5
out-of-range | 2 | lora_alpha: 16
  base_model: m / lora_alpha: 0 / adapter: lora
  cutoff_len: 8 / lora_alpha: 0
learning-rate | 1 | learning_rate: 3e-05
  learning_rate: 2e-3 / per_device_train_batch_size: 32
  learning_rate: 5e-6 / per_device_train_batch_size: 32 / beta: 0.1 / use_peft: true
learning-rate | 2 | learning_rate: 3e-05
  model_name_or_path: bert-base / learning_rate: 2e-3 / per_device_train_batch_size: 32
  model_name_or_path: HuggingFaceTB/SmolLM-360M / learning_rate: 1e-3 / per_device_train_batch_size: 32
learning-rate | 2 | learning_rate: 3e-05
  max_length: 512 / learning_rate: 2e-3 / per_device_train_batch_size: 32
  max_length: 4096 / learning_rate: 2e-3 / per_device_train_batch_size: 32
learning-rate | 1 | learning_rate: 0.0003
  learning_rate: 1e-6 / per_device_train_batch_size: 32 / use_peft: true
  learning_rate: 2e-4 / per_device_train_batch_size: 32 / use_peft: true
comment-value | 3 | per_device_train_batch_size: 96
  # Pushing to 96 to max out RTX 3070 8GB VRAM / # This will achieve 99-100% GPU utilization / per_device_train_batch_size: 16
  # WARNING: 6x slower than batch 96! / # BATCH SIZE 16 - Maximum Generalization / per_device_train_batch_size: 16
comment-value | 2 | correct the comment
  per_device_train_batch_size: 48 / gradient_accumulation_steps: 3  # Effective batch still = 128
  per_device_train_batch_size: 16 / gradient_accumulation_steps: 4  # Effective = 16*4 = 64
comment-value | 2 | per_device_eval_batch_size: 32
  per_device_train_batch_size: 16 / per_device_eval_batch_size: 48  # 2x train (standard)
  per_device_train_batch_size: 16 / per_device_eval_batch_size: 32  # 2x train (standard)
comment-value | 1 | correct the comment
  warmup_ratio: 0.1  # 6% is best
  warmup_ratio: 0.06  # 6% is best
summary-value | 2 | correct the summary: 64 x 2 | suffix=.toml
  name = "p" / summary = "RTX 4060 8 GB: bf16, 32 x 4" / [plugins.batch] / train = 64 / gradient_accumulation_steps = 2
  name = "p" / summary = "RTX 4060 8 GB: bf16, 64 x 2" / [plugins.batch] / train = 64 / gradient_accumulation_steps = 2
summary-value | 2 | correct the summary: fp16 | suffix=.toml
  name = "p" / summary = "bf16, batch 16" / [plugins.precision] / dtype = "fp16"
  name = "p" / summary = "fp16, batch 16" / [plugins.precision] / dtype = "fp16"
checkpointing-off-for-memory | 2 | gradient_checkpointing: true
  # If OOM: disable gradient checkpointing / gradient_checkpointing: false
  # faster / gradient_checkpointing: false
fp16-and-bf16 | 1 | fp16: false | level=error
  bf16: true / fp16: true
  bf16: true / fp16: false
card-feature | 1 | bf16: false and fp16: true | level=error card=T4
  bf16: true
  fp16: true
card-feature | 3 | plugins.precision.dtype = "fp16" | level=warning suffix=.toml card=T4
  name = "p" / [plugins.precision] / dtype = "bf16"
  name = "p" / [plugins.precision] / dtype = "fp16"
card-feature | 1 | remove tf32 | level=error card=T4
  tf32: true
  tf32: false
card-feature | 1 | remove fp16 | level=warning profile=PASCAL
  fp16: true
  fp16: false
tf32-beside-half | 2 |  | level=information
  bf16: true / tf32: true
  tf32: true
apex-level | 2 | remove fp16_opt_level | level=warning
  fp16: true / fp16_opt_level: O2
  fp16: true
fp16-weights | 1 | torch_dtype: float32 | level=error
  torch_dtype: float16 / fp16: true
  torch_dtype: float32 / fp16: true
saving-needless | 3 | gradient_checkpointing: false | card=T4 parameters=109500000.0 max_length=192
  per_device_train_batch_size: 16 / fp16: true / gradient_checkpointing: true
  per_device_train_batch_size: 256 / fp16: true / gradient_checkpointing: true
saving-needless | 3 | optim: adamw_torch_fused | card=T4 parameters=109500000.0 max_length=192
  per_device_train_batch_size: 16 / fp16: true / optim: adamw_bnb_8bit
  per_device_train_batch_size: 256 / fp16: true / optim: adamw_bnb_8bit
card-feature | 1 | attn_implementation: sdpa | level=error card=T4
  attn_implementation: flash_attention_2 / fp16: true
  attn_implementation: sdpa / fp16: true
flash-fp32 | 1 | bf16: true | level=error
  attn_implementation: flash_attention_2 / torch_dtype: float32
  attn_implementation: flash_attention_2 / torch_dtype: float32 / bf16: true
cache-checkpointing | 2 | use_cache: false
  gradient_checkpointing: true / use_cache: true
  gradient_checkpointing: true / use_cache: false
unused-checkpointing | 2 | ddp_find_unused_parameters: false | level=warning
  activation_checkpointing: true / ddp_find_unused_parameters: true
  ddp_find_unused_parameters: true / gradient_checkpointing: true / gradient_checkpointing_kwargs: {use_reentrant: false}
quantized-training | 1 | use_peft: true
  load_in_4bit: true
  load_in_4bit: true / lora: {r: 8}
quantized-training | 3 | or train LoRA
  cutoff_len: 8 / finetuning_type: full / load_in_8bit: true
  cutoff_len: 8 / load_in_8bit: true
states-offload | 1 | optim: adamw_torch
  optim: adamw_bnb_8bit / deepspeed: {zero_optimization: {offload_optimizer: {device: cpu}}}
  optim: adamw_bnb_8bit / deepspeed: {zero_optimization: {offload_optimizer: {device: none}}}
states-offload | 2 | optimizer: adamw_torch
  base_model: m / optimizer: adamw_bnb_8bit / deepspeed: zero3_bf16_cpuoffload_all.json
  base_model: m / optimizer: adamw_bnb_8bit / deepspeed: zero3_bf16_cpuoffload_params.json
eval-logits | 1 | eval_accumulation_steps: 1
  model_name_or_path: Qwen/Qwen2.5-7B / eval_strategy: steps / metric_for_best_model: accuracy
  model_name_or_path: Qwen/Qwen2.5-7B / eval_strategy: steps / metric_for_best_model: eval_loss
fp16-model | 2 | bf16: true
  model_name_or_path: google/gemma-2-9b / fp16: true
  model_name_or_path: google/gemma-2-9b / bf16: true
packing-leak | 1 | attn_implementation: flash_attention_2
  packing: true / attn_implementation: sdpa
  packing: true / use_flash_attention_2: true
packing-leak | 2 | flash_attention: true
  base_model: m / sample_packing: true
  base_model: m / sample_packing: true / sdp_attention: true
packing-leak | 2 | neat_packing: true
  cutoff_len: 8 / packing: true / flash_attn: fa2
  cutoff_len: 8 / packing: true / neat_packing: true
bits-twice | 1 | load_in_8bit: false | level=error
  load_in_8bit: true / load_in_4bit: true / use_peft: true
  load_in_8bit: false / load_in_4bit: true / use_peft: true
qlora-bits | 3 | load_in_8bit: false and load_in_4bit: true
  base_model: m / adapter: qlora / load_in_8bit: true
  base_model: m / adapter: lora / load_in_8bit: true
qlora-bits | 2 | load_in_4bit: true
  base_model: m / adapter: qlora
  base_model: m / adapter: qlora / load_in_4bit: true
reentrant-adapter | 2 | use_reentrant=False | level=warning suffix=.py
  m = get_peft_model(m, LoraConfig(r=8)) / \
a = TrainingArguments("o", gradient_checkpointing=True, gradient_checkpointing_kwargs=dict(use_reentrant=True))
  m = get_peft_model(m, LoraConfig(r=8)); m.enable_input_require_grads() / \
a = TrainingArguments("o", gradient_checkpointing=True, gradient_checkpointing_kwargs=dict(use_reentrant=True))
dora-dropout | 2 | lora_dropout: 0
  use_dora: true / lora_dropout: 0.05
  use_dora: true / lora_dropout: 0
compile-widths | 1 | fixed widths
  torch_compile: true / torch_compile_mode: reduce-overhead
  torch_compile: true / packing: true
compile-graphs | 1 | torch_compile_mode: default | level=error
  torch_compile: true / torch_compile_mode: reduce-overhead / gradient_accumulation_steps: 4
  torch_compile: true / torch_compile_mode: reduce-overhead / gradient_accumulation_steps: 1
length-groups | 1
  train_sampling_strategy: group_by_length
  train_sampling_strategy: random
workers-cores | 1 | num_workers: 3 | cores=4
  dataloader_num_workers: 8
  dataloader_num_workers: 3
pin-without-workers | 2 | dataloader_num_workers: 2
  dataloader_num_workers: 0 / dataloader_pin_memory: true
  dataloader_num_workers: 2 / dataloader_pin_memory: true
prefetch-without-workers | 1 | dataloader_num_workers: 2 | level=error
  dataloader_prefetch_factor: 4
  dataloader_prefetch_factor: 4 / dataloader_num_workers: 2
persistent-without-workers | 2 | dataloader_num_workers: 2 | level=error
  dataloader_num_workers: 0 / dataloader_persistent_workers: true
  dataloader_num_workers: 1 / dataloader_persistent_workers: true
workers-restarted | 2 | dataloader_persistent_workers: true
  dataloader_num_workers: 4 / dataloader_persistent_workers: false
  dataloader_num_workers: 4 / dataloader_persistent_workers: true
warmup-share | 1 | warmup_ratio: 0.06
  warmup_ratio: 0.2
  warmup_ratio: 0.1
warmup-share | 1 | warmup_steps: 6
  warmup_steps: 1 / max_steps: 100
  warmup_steps: 3 / max_steps: 100
warmup-share | 1 | warmup_steps: 19 | level=error rows=20000
  warmup_steps: 500 / num_train_epochs: 1 / per_device_train_batch_size: 64
  warmup_steps: 100 / num_train_epochs: 5 / per_device_train_batch_size: 64
warmup-twice | 1 | remove
  warmup_ratio: 0.06 / warmup_steps: 10
  warmup_ratio: 0.06 / warmup_steps: 0
steps-and-epochs | 2 | remove
  max_steps: 10 / num_train_epochs: 2
  max_steps: -1 / num_train_epochs: 2
no-clipping | 1 | max_grad_norm: 1
  max_grad_norm: 0
  max_grad_norm: 1.0
no-clipping | 2 | "gradient_clipping": 1 | suffix=.json
  {"zero_optimization": { / "stage": 2}}
  {"zero_optimization": { / "stage": 2}, "gradient_clipping": "auto"}
nonfinite-filter | 1 | logging_nan_inf_filter: false
  logging_nan_inf_filter: true
  logging_nan_inf_filter: false
best-model | 2 | save_strategy: epoch | level=error
  eval_strategy: epoch / load_best_model_at_end: true
  eval_strategy: epoch / save_strategy: epoch / load_best_model_at_end: true
best-model | 3 | save_steps: 200 | level=error
  eval_strategy: steps / eval_steps: 100 / save_steps: 250 / load_best_model_at_end: true
  eval_strategy: steps / eval_steps: 100 / save_steps: 200 / load_best_model_at_end: true
refused-keyword | 2 | use max_length | suffix=.py
  from trl import SFTConfig / args = SFTConfig("out", max_seq_length=64)
  from trl import SFTConfig / args = SFTConfig("out", max_length=64)
refused-keyword | 3 | give max_length to SFTConfig | suffix=.py
  import trl / args = trl.SFTConfig("out", packing=False) / trainer = trl.SFTTrainer("m", args, max_seq_length=64)
  import trl / args = trl.SFTConfig("out", packing=False) / trainer = trl.SFTTrainer("m", args, processing_class=None)
refused-keyword | 2 | use eval_strategy | suffix=.py
  from transformers import TrainingArguments as A, TrainingArguments / own = dict(evaluation_strategy="no") / \
A("out", **own) / TrainingArguments("out")
  from own import TrainingArguments / args = TrainingArguments("out", evaluation_strategy="no")
former-name | 1 | use eval_strategy
  evaluation_strategy: epoch
  eval_strategy: epoch
former-name | 1 | remove half_precision_backend
  half_precision_backend: auto / fp16: true
  fp16: true
deprecated-name | 1 | use activation_checkpointing | level=information
  gradient_checkpointing: true
  activation_checkpointing: true
former-name | 2 | use rl_beta
  base_model: m / dpo_beta: 0.1
  base_model: m / rl_beta: 0.1 / warmup_ratio: 0.1 / eval_table_size:
former-name | 2 | use eval_strategy
  cutoff_len: 8 / evaluation_strategy: epoch
  cutoff_len: 8 / overwrite_output_dir: true / warmup_ratio: 0.1
misspelled-name | 2 | use cutoff_len | level=error
  finetuning_type: lora / cutof_len: 8
  finetuning_type: lora / batch_size: 4 / cutoff_len: 8 / overwrite_output_dir: true / save_safetensors: true
misspelled-name | 2 | use lora_rank | level=error
  finetuning_type: lora / lora_r: 8
  finetuning_type: lora / lora_rank: 8
misspelled-name | 2 | use sequence_len
  base_model: m / sequence_lenn: 8
  base_model: m / sequence_len: 8 / sequence_parallel_degree: 2
misspelled-name | 2 | use mixed_precision | level=error
  compute_environment: LOCAL_MACHINE / mixed_precison: bf16
  compute_environment: LOCAL_MACHINE / mixed_precision: bf16 / dynamo_config: {dynamo_backend: INDUCTOR}
misspelled-name | 2 | use gradient_clipping | suffix=.json
  {"zero_optimization": {}, / "gradient_cliping": 1}
  {"zero_optimization": {}, / "gradient_clipping": 1}
misspelled-name | 2 | use max_completion_length
  num_generations: 4 / max_completion_lenght: 64 / fp16: true
  num_generations: 4 / max_completion_length: 64 / ref_model_init_kwargs: {} / fp16: true
misspelled-name | 2 | use learning_rate
  fp16: true / learning_rat: 1e-4
  fp16: true / learning_rate: 1e-4
not-a-value | 1 | correct the value | level=error
  per_device_train_batch_size: 16  ← Actually 16, not 96!
  per_device_train_batch_size: 16  # Actually 16, not 96!
key-twice | 1 | remove one of the two
  fp16: true / fp16: false
  fp16: true
interpolation | 2
  fp16: true / learning_rate: ${lr}
  fp16: true / learning_rate: 1e-5
cpu-ranks | 3 | distributed_type: MULTI_GPU | level=error
  compute_environment: LOCAL_MACHINE / use_cpu: true / num_processes: 2 / distributed_type: MULTI_CPU
  compute_environment: LOCAL_MACHINE / use_cpu: true / num_processes: 2 / distributed_type: MULTI_GPU
fp16-cpu | 2 | mixed_precision: bf16
  use_cpu: true / mixed_precision: fp16
  use_cpu: true / mixed_precision: bf16
launch-processes | 2 | num_processes: 4
  compute_environment: LOCAL_MACHINE / num_processes: 6 / num_machines: 4
  compute_environment: LOCAL_MACHINE / num_processes: 8 / num_machines: 4 / machine_rank: 3
launch-processes | 2 | num_processes: 2
  compute_environment: LOCAL_MACHINE / num_processes: 4 / gpu_ids: 0,1
  compute_environment: LOCAL_MACHINE / num_processes: 4 / gpu_ids: all
launch-processes | 2 | machine_rank: 1
  compute_environment: LOCAL_MACHINE / num_machines: 2 / num_processes: 2 / machine_rank: 2
  compute_environment: LOCAL_MACHINE / num_machines: 2 / num_processes: 2 / machine_rank: 0
launch-processes | 2 | distributed_type: MULTI_GPU
  compute_environment: LOCAL_MACHINE / num_processes: 2 / distributed_type: "NO"
  compute_environment: LOCAL_MACHINE / num_processes: 1 / distributed_type: "NO"
deepspeed-twice | 1 | set optimizer.params.lr to "auto" | level=error
  learning_rate: 5e-5 / deepspeed: {optimizer: {type: AdamW, params: {lr: 1e-4}}}
  learning_rate: 5e-5 / deepspeed: {optimizer: {type: AdamW, params: {lr: auto}}} / optim: adamw_torch_fused
deepspeed-twice | 1 | remove scheduler from | level=warning
  lr_scheduler_type: cosine / deepspeed: {scheduler: {type: WarmupDecayLR}}
  lr_scheduler_type: linear / deepspeed: {scheduler: {type: WarmupDecayLR}}
offload-stage | 2 | "zero_optimization.stage": 3 | level=error suffix=.json
  {"zero_optimization": {"stage": 2, / "offload_param": {"device": "cpu"}}}
  {"zero_optimization": {"stage": 3, / "offload_param": {"device": "cpu"}}}
precision-twice | 2 | remove mixed_precision | level=error
  compute_environment: LOCAL_MACHINE / mixed_precision: bf16 / deepspeed_config: /   deepspeed_config_file: ds.json
  compute_environment: LOCAL_MACHINE / deepspeed_config: /   deepspeed_config_file: ds.json
"""
"""Three lines for a case: the rule | the line of the finding | a part of the fix | options of the case; a file that breaks the
rule; one that does not. " / " begins a new line of a file."""
TYPES = {"rows": int, "cores": int, "max_length": int, "parameters": float}


def read_cases() -> Iterator[Case]:
    lines = TABLE.strip("\n").splitlines()
    for head, *files in zip(lines[::3], lines[1::3], lines[2::3], strict=True):
        rule, line, fix, options = (*head.split(" | "), "", "")[:4]
        given = {key: TYPES.get(key, str)(value) for key, value in (pair.split("=") for pair in options.split())}
        broken, fine = (text.removeprefix("  ").replace(" / ", "\n") + "\n" for text in files)
        yield Case(rule, int(line), fix, broken, fine, given.pop("suffix", ".yaml"), given.pop("level", ""), given)


CASES = list(read_cases())
PASCAL = 'name = "pascal"\n[card]\nmatch = ["GTX 1080"]\nmemory_gib = 8\ncompute_capability = "6.1"\n'


def report_on(text: str, case: Case, folder: Path) -> CheckReport:
    folder.mkdir(exist_ok=True)
    path = folder / f"config{case.suffix}"
    path.write_text(text, encoding="utf-8")
    (folder / "pascal.toml").write_text(PASCAL)
    given = {key: str(folder / "pascal.toml") if value == "PASCAL" else value for key, value in case.given.items()}
    return check_file(path, Given(**{"card": None if "profile" in given else "A100", **given}), INPUTS)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)
def test_rule_finds_the_mistake_at_its_line_with_the_fix_and_nothing_without_it(case: Case, tmp_path: Path) -> None:
    (found,) = [each for each in report_on(case.broken, case, tmp_path).findings if each.rule == case.rule]
    assert found.place == f"{tmp_path / 'config'}{case.suffix}:{case.line}"
    assert case.fix in found.fix
    assert found.level == (case.level or next(rule.level for rule in installed_rules() if rule.name == case.rule))
    assert found.what.endswith(".")
    assert found.why.endswith(".")
    assert case.rule not in {each.rule for each in report_on(case.fine, case, tmp_path / "fine").findings}


def test_every_rule_has_a_case() -> None:
    assert {case.rule for case in CASES} == {rule.name for rule in installed_rules()}


@pytest.mark.parametrize("name", INPUTS.files)
def test_builtin_profile_has_no_error_and_no_wrong_comment(name: str) -> None:
    report = check_file(INPUTS.files[name], Given(cores=8), INPUTS)
    assert report.count("error") == 0
    assert not {"comment-value", "summary-value"} & {each.rule for each in report.findings}


def test_card_rules_say_that_they_need_a_card(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("bf16: true\ntf32: true\ndataloader_num_workers: 4\n")
    report = check(view_of(read_source(path), INPUTS), Facts(), installed_rules())
    assert any("card-feature" in each and "--card" in each for each in report.waiting)
    assert any("workers-cores" in each and "--cores" in each for each in report.waiting)
    assert report.exit_code() == 0


def test_invalid_profile_is_a_report_with_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text('name = "p"\n[plugins.batch]\ntrian = 4\ntrain = "x"\n')
    report = check_file(path, Given(), INPUTS)
    assert report.exit_code() == 2
    assert {each.place for each in report.findings} == {f"{path}:3", f"{path}:4"}
    assert {each.key for each in report.findings} == {"plugins.batch.trian", "plugins.batch.train"}


def test_plugin_options_of_a_job_are_merged_with_the_profile_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    text = '[model]\nname = "m"\n[data]\ntrain = "t.csv"\nmax_length = 64\n[plugins.batch]\n'
    path.write_text(f"{text}eval = 100\n")
    (found,) = [each for each in check_file(path, Given(profile="t4_16gb"), INPUTS).findings if each.rule == "eval-batch"]
    assert found.place == f"{path}:7"
    assert "100, 6.25 times the training batch of 16" in found.what
    path.write_text(f"{text}evil = 100\n")
    report = check_file(path, Given(profile="t4_16gb"), Inputs())
    assert report.exit_code() == 2
    assert report.findings[0].place == f"{path}:7"
    assert "Did you mean 'eval'" in report.findings[0].what


def test_deepspeed_file_beside_the_arguments_is_read(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text("base_model: m\noptimizer: lion_8bit\ndeepspeed: ds.json\n")
    (tmp_path / "ds.json").write_text('{"optimizer": {"type": "AdamW"}}')
    (found,) = [each for each in check_file(path, Given(card="A100"), INPUTS).findings if each.rule == "deepspeed-twice"]
    assert found.what == "optimizer is lion_8bit, and the DeepSpeed configuration has optimizer.type = AdamW."
    assert found.why == "DeepSpeed's is taken; optimizer has no effect."


def test_optimizers_are_those_of_transformers() -> None:
    from transformers.training_args import OptimizerNames

    assert {each.value for each in OptimizerNames} <= OPTIMIZERS
