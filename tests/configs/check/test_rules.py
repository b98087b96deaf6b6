"""Each rule: a file that breaks it, with the line and the fix, and one that does not."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hwopt.configs.check.checker import CheckReport
from hwopt.configs.check.facts import Given
from hwopt.configs.check.files import check_file
from hwopt.configs.check.registry import installed_rules
from hwopt.planning.inputs import Inputs

INPUTS = Inputs()


@dataclass(frozen=True)
class Case:
    rule: str
    broken: str
    fine: str
    line: int
    """Of the finding in `broken`."""
    fix: str = ""
    """A part of the fix."""
    level: str = ""
    given: dict[str, object] = field(default_factory=dict)
    suffix: str = ".yaml"


T4: dict[str, object] = {"card": "T4"}
BERT: dict[str, object] = {"card": "T4", "parameters": 109.5e6, "max_length": 192}
CASES = [
    Case(
        "eval-batch",
        "per_device_train_batch_size: 16\nper_device_eval_batch_size: 192\n",
        "per_device_train_batch_size: 16\nper_device_eval_batch_size: 64\n",
        2,
        "per_device_eval_batch_size: 32",
    ),
    Case(
        "step-rows-small",
        "per_device_train_batch_size: 16\ngradient_accumulation_steps: 1\n",
        "per_device_train_batch_size: 16\ngradient_accumulation_steps: 4\n",
        2,
        "gradient_accumulation_steps: 4",
        given={"rows": 20_000},
    ),
    Case(
        "step-rows-small",
        "per_device_train_batch_size: 16\ngradient_accumulation_steps: 1\n",
        "per_device_train_batch_size: 16\ngradient_accumulation_steps: 1\npacking: true\n",
        2,
        "gradient_accumulation_steps: 2",
    ),
    Case(
        "step-rows-changed",
        "per_device_train_batch_size: 48  # instead of 64\ngradient_accumulation_steps: 3   # instead of 2\n",
        "per_device_train_batch_size: 32  # instead of 64\ngradient_accumulation_steps: 4   # instead of 2\n",
        1,
        "per_device_train_batch_size: 32 and gradient_accumulation_steps: 4",
    ),
    Case(
        "step-rows-changed",
        "per_device_train_batch_size: 32\ngradient_accumulation_steps: 3\nper_device_train_batch_size: 48\n",
        "per_device_train_batch_size: 32\ngradient_accumulation_steps: 3\n"
        "per_device_train_batch_size: 48\ngradient_accumulation_steps: 2\n",
        3,
        "gradient_accumulation_steps: 2",
    ),
    Case(
        "step-rows-contradict",
        '{"train_batch_size": 100,\n"train_micro_batch_size_per_gpu": 16, "gradient_accumulation_steps": 4}',
        '{"train_batch_size": 128,\n"train_micro_batch_size_per_gpu": 16, "gradient_accumulation_steps": 4}',
        1,
        '"train_batch_size": 64',
        suffix=".json",
    ),
    Case("batch-search", "auto_find_batch_size: true\n", "auto_find_batch_size: false\n", 1, "auto_find_batch_size: false"),
    Case(
        "batch-power-of-two",
        "training:\n  per_device_train_batch_size: 80\n",
        "training:\n  per_device_train_batch_size: 64\n",
        2,
        level="information",
    ),
    Case(
        "learning-rate",
        "learning_rate: 2e-3\nper_device_train_batch_size: 32\n",
        "learning_rate: 2e-5\nper_device_train_batch_size: 32\n",
        1,
        "learning_rate: 3e-05",
    ),
    Case(
        "learning-rate",
        "learning_rate: 1e-6\nper_device_train_batch_size: 32\nuse_peft: true\n",
        "learning_rate: 2e-4\nper_device_train_batch_size: 32\nuse_peft: true\n",
        1,
        "learning_rate: 0.0003",
    ),
    Case(
        "comment-value",
        "# Pushing to 96 to max out RTX 3070 8GB VRAM\n# This will achieve 99-100% GPU utilization\n"
        "per_device_train_batch_size: 16\n",
        "# WARNING: 6x slower than batch 96!\n# BATCH SIZE 16 - Maximum Generalization\nper_device_train_batch_size: 16\n",
        3,
        "per_device_train_batch_size: 96",
    ),
    Case(
        "comment-value",
        "per_device_train_batch_size: 48\ngradient_accumulation_steps: 3  # Effective batch still = 128\n",
        "per_device_train_batch_size: 16\ngradient_accumulation_steps: 4  # Effective = 16*4 = 64\n",
        2,
        "correct the comment",
    ),
    Case(
        "comment-value",
        "per_device_train_batch_size: 16\nper_device_eval_batch_size: 48  # 2x train (standard)\n",
        "per_device_train_batch_size: 16\nper_device_eval_batch_size: 32  # 2x train (standard)\n",
        2,
        "per_device_eval_batch_size: 32",
    ),
    Case("comment-value", "warmup_ratio: 0.1  # 6% is best\n", "warmup_ratio: 0.06  # 6% is best\n", 1, "correct the comment"),
    Case("comment-value", "num_workers: 8  # 4 workers\n", "num_workers: 4  # 4 workers, not 8 workers\n", 1, "num_workers: 4"),
    Case(
        "summary-value",
        'name = "p"\nsummary = "RTX 4060 8 GB: bf16, 32 x 4"\n[plugins.batch]\ntrain = 64\ngradient_accumulation_steps = 2\n',
        'name = "p"\nsummary = "RTX 4060 8 GB: bf16, 64 x 2"\n[plugins.batch]\ntrain = 64\ngradient_accumulation_steps = 2\n',
        2,
        "correct the summary: 64 x 2",
        suffix=".toml",
    ),
    Case(
        "summary-value",
        'name = "p"\nsummary = "bf16, batch 16"\n[plugins.precision]\ndtype = "fp16"\n',
        'name = "p"\nsummary = "fp16, batch 16"\n[plugins.precision]\ndtype = "fp16"\n',
        2,
        "correct the summary: fp16",
        suffix=".toml",
    ),
    Case(
        "checkpointing-off-for-memory",
        "# If OOM: disable gradient checkpointing\ngradient_checkpointing: false\n",
        "# faster\ngradient_checkpointing: false\n",
        2,
        "gradient_checkpointing: true",
    ),
    Case("fp16-and-bf16", "bf16: true\nfp16: true\n", "bf16: true\nfp16: false\n", 1, "fp16: false", "error"),
    Case("bf16-card", "bf16: true\n", "fp16: true\n", 1, "bf16: false and fp16: true", "error", T4),
    Case("bf16-card", "bf16: true\n", "fp16: true\n", 1, "fp16: true", "error", {"card": "V100"}),
    Case(
        "bf16-card",
        'name = "p"\n[plugins.precision]\ndtype = "bf16"\n',
        'name = "p"\n[plugins.precision]\ndtype = "fp16"\n',
        3,
        'plugins.precision.dtype = "fp16"',
        "warning",
        T4,
        ".toml",
    ),
    Case("tf32-card", "tf32: true\n", "tf32: false\n", 1, "remove tf32", "error", T4),
    Case("tf32-card", "tf32: true\n", "tf32: false\n", 1, "remove tf32", "error", {"card": "V100"}),
    Case("fp16-card", "fp16: true\n", "fp16: false\n", 1, "remove fp16", given={"profile": "PASCAL"}),
    Case("tf32-beside-half", "bf16: true\ntf32: true\n", "tf32: true\n", 2, level="information"),
    Case("apex-level", "fp16: true\nfp16_opt_level: O2\n", "fp16: true\n", 2, "remove fp16_opt_level", "warning"),
    Case("apex-level", "fp16: true\nfp16_opt_level: O1\n", "fp16: true\n", 2, "remove fp16_opt_level", "information"),
    Case(
        "fp16-weights",
        "torch_dtype: float16\nfp16: true\n",
        "torch_dtype: float32\nfp16: true\n",
        1,
        "torch_dtype: float32",
        "error",
    ),
    Case(
        "checkpointing-needless",
        "per_device_train_batch_size: 16\nfp16: true\ngradient_checkpointing: true\n",
        "per_device_train_batch_size: 256\nfp16: true\ngradient_checkpointing: true\n",
        3,
        "gradient_checkpointing: false",
        given=BERT,
    ),
    Case(
        "states-needless",
        "per_device_train_batch_size: 16\nfp16: true\noptim: adamw_bnb_8bit\n",
        "per_device_train_batch_size: 256\nfp16: true\noptim: adamw_bnb_8bit\n",
        3,
        "optim: adamw_torch_fused",
        given=BERT,
    ),
    Case(
        "flash-card",
        "attn_implementation: flash_attention_2\nfp16: true\n",
        "attn_implementation: sdpa\nfp16: true\n",
        1,
        "attn_implementation: sdpa",
        "error",
        T4,
    ),
    Case(
        "flash-fp32",
        "attn_implementation: flash_attention_2\ntorch_dtype: float32\n",
        "attn_implementation: flash_attention_2\ntorch_dtype: float32\nbf16: true\n",
        1,
        "bf16: true",
        "error",
    ),
    Case(
        "cache-checkpointing",
        "gradient_checkpointing: true\nuse_cache: true\n",
        "gradient_checkpointing: true\nuse_cache: false\n",
        2,
        "use_cache: false",
    ),
    Case(
        "unused-checkpointing",
        "activation_checkpointing: true\nddp_find_unused_parameters: true\n",
        "ddp_find_unused_parameters: true\ngradient_checkpointing: true\ngradient_checkpointing_kwargs: {use_reentrant: false}\n",
        2,
        "ddp_find_unused_parameters: false",
        "warning",
    ),
    Case("quantized-training", "load_in_4bit: true\n", "load_in_4bit: true\nlora: {r: 8}\n", 1, "use_peft: true"),
    Case(
        "quantized-training",
        "cutoff_len: 8\nfinetuning_type: full\nload_in_8bit: true\n",
        "cutoff_len: 8\nload_in_8bit: true\n",
        3,
        "or train LoRA",
    ),
    Case(
        "states-offload",
        "optim: adamw_bnb_8bit\ndeepspeed: {zero_optimization: {offload_optimizer: {device: cpu}}}\n",
        "optim: adamw_bnb_8bit\ndeepspeed: {zero_optimization: {offload_optimizer: {device: none}}}\n",
        1,
        "optim: adamw_torch",
    ),
    Case(
        "eval-logits",
        "model_name_or_path: Qwen/Qwen2.5-7B\neval_strategy: steps\nmetric_for_best_model: accuracy\n",
        "model_name_or_path: Qwen/Qwen2.5-7B\neval_strategy: steps\nmetric_for_best_model: eval_loss\n",
        1,
        "eval_accumulation_steps: 1",
    ),
    Case(
        "fp16-model",
        "model_name_or_path: google/gemma-2-9b\nfp16: true\n",
        "model_name_or_path: google/gemma-2-9b\nbf16: true\n",
        2,
        "bf16: true",
    ),
    Case(
        "packing-leak",
        "base_model: m\nsample_packing: true\n",
        "base_model: m\nsample_packing: true\nflash_attention: true\n",
        2,
        "attn_implementation: flash_attention_2",
    ),
    Case(
        "reentrant-adapter",
        "use_peft: true\ngradient_checkpointing: true\ngradient_checkpointing_kwargs:\n  use_reentrant: true\n",
        "use_peft: true\ngradient_checkpointing: true\ngradient_checkpointing_kwargs:\n  use_reentrant: false\n",
        4,
        "gradient_checkpointing_kwargs.use_reentrant: false",
        "warning",
    ),
    Case("dora-dropout", "use_dora: true\nlora_dropout: 0.05\n", "use_dora: true\nlora_dropout: 0\n", 2, "lora_dropout: 0"),
    Case(
        "compile-widths",
        "torch_compile: true\ntorch_compile_mode: reduce-overhead\n",
        "torch_compile: true\npacking: true\n",
        2,
        "torch_compile_mode: default",
    ),
    Case("length-groups", "train_sampling_strategy: group_by_length\n", "train_sampling_strategy: random\n", 1),
    Case("workers-cores", "dataloader_num_workers: 8\n", "dataloader_num_workers: 3\n", 1, "num_workers: 3", given={"cores": 4}),
    Case(
        "pin-without-workers",
        "dataloader_num_workers: 0\ndataloader_pin_memory: true\n",
        "dataloader_num_workers: 2\ndataloader_pin_memory: true\n",
        2,
        "dataloader_num_workers: 2",
    ),
    Case(
        "prefetch-without-workers",
        "dataloader_prefetch_factor: 4\n",
        "dataloader_prefetch_factor: 4\ndataloader_num_workers: 2\n",
        1,
        "dataloader_num_workers: 2",
        "error",
    ),
    Case(
        "persistent-without-workers",
        "dataloader_num_workers: 0\ndataloader_persistent_workers: true\n",
        "dataloader_num_workers: 1\ndataloader_persistent_workers: true\n",
        2,
        "dataloader_num_workers: 2",
        "error",
    ),
    Case(
        "workers-restarted",
        "dataloader_num_workers: 4\ndataloader_persistent_workers: false\n",
        "dataloader_num_workers: 4\ndataloader_persistent_workers: true\n",
        2,
        "dataloader_persistent_workers: true",
    ),
    Case("warmup-share", "warmup_ratio: 0.2\n", "warmup_ratio: 0.1\n", 1, "warmup_ratio: 0.06"),
    Case("warmup-share", "warmup_steps: 1\nmax_steps: 100\n", "warmup_steps: 3\nmax_steps: 100\n", 1, "warmup_steps: 6"),
    Case(
        "warmup-beyond-run",
        "warmup_steps: 500\nnum_train_epochs: 1\nper_device_train_batch_size: 64\n",
        "warmup_steps: 100\nnum_train_epochs: 5\nper_device_train_batch_size: 64\n",
        1,
        "warmup_steps: 19",
        "error",
        {"rows": 20_000},
    ),
    Case("warmup-beyond-run", "warmup_steps: 100\nmax_steps: 50\n", "warmup_steps: 5\nmax_steps: 50\n", 1, "warmup_steps: 3"),
    Case("warmup-twice", "warmup_ratio: 0.06\nwarmup_steps: 10\n", "warmup_ratio: 0.06\nwarmup_steps: 0\n", 1, "remove"),
    Case("steps-and-epochs", "max_steps: 10\nnum_train_epochs: 2\n", "max_steps: -1\nnum_train_epochs: 2\n", 2, "remove"),
    Case("no-clipping", "max_grad_norm: 0\n", "max_grad_norm: 1.0\n", 1, "max_grad_norm: 1"),
    Case(
        "no-clipping",
        '{"zero_optimization": {\n"stage": 2}}',
        '{"zero_optimization": {\n"stage": 2}, "gradient_clipping": "auto"}',
        2,
        '"gradient_clipping": 1',
        suffix=".json",
    ),
    Case(
        "nonfinite-filter",
        "logging_nan_inf_filter: true\n",
        "logging_nan_inf_filter: false\n",
        1,
        "logging_nan_inf_filter: false",
    ),
    Case(
        "best-model-strategy",
        "eval_strategy: epoch\nload_best_model_at_end: true\n",
        "eval_strategy: epoch\nsave_strategy: epoch\nload_best_model_at_end: true\n",
        2,
        "save_strategy: epoch",
        "error",
    ),
    Case(
        "best-model-steps",
        "eval_strategy: steps\neval_steps: 100\nsave_steps: 250\nload_best_model_at_end: true\n",
        "eval_strategy: steps\neval_steps: 100\nsave_steps: 200\nload_best_model_at_end: true\n",
        3,
        "save_steps: 200",
        "error",
    ),
    Case("former-name", "evaluation_strategy: epoch\n", "eval_strategy: epoch\n", 1, "use eval_strategy"),
    Case("former-name", "half_precision_backend: auto\nfp16: true\n", "fp16: true\n", 1, "remove half_precision_backend"),
    Case(
        "deprecated-name",
        "gradient_checkpointing: true\n",
        "activation_checkpointing: true\n",
        1,
        "use activation_checkpointing",
        "information",
    ),
    Case("misspelled-name", "fp16: true\nlearning_rat: 1e-4\n", "fp16: true\nlearning_rate: 1e-4\n", 2, "use learning_rate"),
    Case(
        "not-a-value",
        "per_device_train_batch_size: 16  ← Actually 16, not 96!\n",
        "per_device_train_batch_size: 16  # Actually 16, not 96!\n",
        1,
        "correct the value",
        "error",
    ),
    Case("key-twice", "fp16: true\nfp16: false\n", "fp16: true\n", 1, "remove one of the two"),
    Case("interpolation", "fp16: true\nlearning_rate: ${lr}\n", "fp16: true\nlearning_rate: 1e-5\n", 2),
    Case(
        "cpu-ranks",
        "compute_environment: LOCAL_MACHINE\nuse_cpu: true\nnum_processes: 2\ndistributed_type: MULTI_CPU\n",
        "compute_environment: LOCAL_MACHINE\nuse_cpu: true\nnum_processes: 2\ndistributed_type: MULTI_GPU\n",
        3,
        "distributed_type: MULTI_GPU",
        "error",
    ),
    Case(
        "offload-stage",
        '{"zero_optimization": {"stage": 2,\n"offload_param": {"device": "cpu"}}}',
        '{"zero_optimization": {"stage": 3,\n"offload_param": {"device": "cpu"}}}',
        2,
        '"zero_optimization.stage": 3',
        "error",
        suffix=".json",
    ),
    Case(
        "precision-twice",
        "compute_environment: LOCAL_MACHINE\nmixed_precision: bf16\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n",
        "compute_environment: LOCAL_MACHINE\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n",
        2,
        "remove mixed_precision",
        "error",
    ),
]
PASCAL = 'name = "pascal"\n[card]\nmatch = ["GTX 1080"]\nmemory_gib = 8\ncompute_capability = "6.1"\n'


def report_on(text: str, case: Case, folder: Path) -> CheckReport:
    path = folder / f"config{case.suffix}"
    path.write_text(text, encoding="utf-8")
    (folder / "pascal.toml").write_text(PASCAL)
    given = {key: str(folder / "pascal.toml") if value == "PASCAL" else value for key, value in case.given.items()}
    return check_file(path, Given(**{"card": None if "profile" in given else "A100", **given}), INPUTS)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)
def test_rule_finds_the_mistake_at_its_line_with_the_fix(case: Case, tmp_path: Path) -> None:
    found = [each for each in report_on(case.broken, case, tmp_path).findings if each.rule == case.rule]
    assert len(found) == 1
    assert found[0].place == f"{tmp_path / 'config'}{case.suffix}:{case.line}"
    assert case.fix in found[0].fix
    assert found[0].level == (case.level or next(rule.level for rule in installed_rules() if rule.name == case.rule))
    assert found[0].what.endswith(".")
    assert found[0].why.endswith(".")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)
def test_rule_is_silent_without_the_mistake(case: Case, tmp_path: Path) -> None:
    assert case.rule not in {each.rule for each in report_on(case.fine, case, tmp_path).findings}


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
    from hwopt.configs.check.checker import check
    from hwopt.configs.check.contract import Facts
    from hwopt.configs.recognise import read_view

    report = check(read_view(path, INPUTS), Facts(), installed_rules())
    assert any("bf16-card" in each and "--card" in each for each in report.waiting)
    assert any("workers-cores" in each and "--cores" in each for each in report.waiting)
    assert report.exit_code() == 0


def test_invalid_profile_is_a_report_with_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text('name = "p"\n[plugins.batch]\ntrian = 4\ntrain = "x"\n')
    report = check_file(path, Given(), INPUTS)
    assert report.exit_code() == 2
    assert {each.place for each in report.findings} == {f"{path}:3", f"{path}:4"}
    assert {each.key for each in report.findings} == {"plugins.batch.trian", "plugins.batch.train"}


def test_job_is_checked_together_with_a_profile(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('[model]\nname = "m"\n[data]\ntrain = "t.csv"\n[training]\nlearning_rate = 0.01\n')
    alone = check_file(path, Given(card="T4"), INPUTS)
    together = check_file(path, Given(profile="t4_16gb"), INPUTS)
    assert "learning-rate" not in {each.rule for each in alone.findings}
    assert "learning-rate" in {each.rule for each in together.findings}


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
