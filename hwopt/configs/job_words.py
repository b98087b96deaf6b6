"""The keys of a job for words of TrainingArguments, and the words that are left out on purpose, with the reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hwopt.configs.view import View


class WithoutEquivalent(Exception):
    """The value cannot be expressed; the message is the reason."""


class NothingToSet(Exception):
    """The value is what hwopt does anyway; the message says so."""


JobKey = tuple[str, str]
Result = tuple[JobKey, Any]

REASONS = {
    "do_train": "`hwopt run` trains",
    "do_eval": "a run evaluates if the job names data for it",
    "do_predict": "`hwopt predict` predicts",
    "output_dir": "give --output-dir to `hwopt run`",
    "run_name": "give --name to `hwopt run`",
    "resume_from_checkpoint": "give --resume, or --resume-from CHECKPOINT",
    "overwrite_output_dir": "give --fresh to `hwopt run`",
    "trust_remote_code": "give --trust-remote-code MODEL_NAME: a file cannot allow it",
    "use_cpu": "give --profile cpu",
    "report_to": "the run folder has the metrics",
    "logging_dir": "the run folder has the metrics",
    "save_safetensors": "hwopt writes safetensors always",
    "remove_unused_columns": "the job names its columns",
    "fp16_backend": "torch's native AMP is the only one",
    "half_precision_backend": "torch's native AMP is the only one",
    "num_processes": "give --processes N; the rows of a step are counted over all ranks",
    "num_machines": "the launcher's command line says it",
    "distributed_type": "the plugins of the profile choose the engine",
    "torch_compile_backend": "hwopt compiles with inductor",
    "gradient_checkpointing_kwargs.use_reentrant": "hwopt's checkpointing is never reentrant",
    "logging_nan_inf_filter": "training.on_nonfinite says what follows a loss that is not finite",
    "average_tokens_across_devices": "hwopt divides by the tokens of the whole step, over all ranks",
    "ddp_timeout": "training.hang_timeout ends a run that hangs",
    "ddp_find_unused_parameters": "hwopt's data parallelism needs no search",
    "log_level": "the command line has its own output",
    "log_level_replica": "the command line has its own output",
    "disable_tqdm": "the command line has its own output",
    "logging_first_step": "the first step is always logged",
    "include_num_input_tokens_seen": "the log has the tokens of each interval",
    "full_determinism": "a run with the same seed has the same bits: docs/exactness.md",
    "data_seed": "training.seed covers the order of the data",
    "save_only_model": "checkpoints are for resuming; final/ has the model alone",
    "ignore_data_skip": "a resumed run continues at its next batch without skipping",
    "max_train_samples": "a file with fewer rows does it",
}
"""Word -> why it is left out on purpose."""

JOB_KEYS: Mapping[str, JobKey] = {
    "model_name_or_path": ("model", "name"),
    "tokenizer_name": ("model", "tokenizer"),
    "model_revision": ("model", "revision"),
    "train_file": ("data", "train"),
    "validation_file": ("data", "eval"),
    "test_file": ("data", "test"),
    "text_column": ("data", "text"),
    "label_column": ("data", "label"),
    "messages_column": ("data", "messages"),
    "prompt_column": ("data", "prompt"),
    "completion_column": ("data", "completion"),
    "max_length": ("data", "max_length"),
    "eval_fraction": ("data", "eval_fraction"),
    "task": ("task", "kind"),
    "label_smoothing_factor": ("task", "label_smoothing"),
}


def evaluation(view: View, value: Any) -> Result:
    if value == "epoch":
        raise NothingToSet("hwopt evaluates at the end of each epoch by default")
    if value == "steps":
        raise NothingToSet("training.eval_steps says it")
    raise WithoutEquivalent("hwopt evaluates at the end of each epoch if the job has data for it; leave data.eval out")


def saving(view: View, value: Any) -> Result:
    if value == "no":
        return ("training", "save_minutes"), 0.0
    if value == "steps":
        raise NothingToSet("training.save_steps says it")
    if value == "best":
        raise NothingToSet("hwopt keeps the best weights by default")
    raise WithoutEquivalent("hwopt saves every training.save_minutes (15) minutes, and the best weights at each evaluation")


def logging(view: View, value: Any) -> Result:
    if value == "steps":
        raise NothingToSet("training.logging_steps says it")
    raise WithoutEquivalent("hwopt logs every training.logging_steps steps")


def best_model(view: View, value: Any) -> Result:
    if value:
        raise NothingToSet("final/ holds the best weights by default")
    raise WithoutEquivalent("final/ holds the best weights if the job has data for evaluation")


def steps_of(word: str, strategy: str) -> Callable[[View, Any], Result]:
    def found(view: View, value: Any) -> Result:
        chosen = view.value(strategy)
        if chosen in ("epoch", "no"):
            raise NothingToSet(f"{view.spelled(strategy)} is {chosen!r}, so the value has no effect")
        if value < 1:
            raise WithoutEquivalent("a share of the steps; hwopt takes a number of steps")
        return ("training", word), int(value)

    return found


def warmup_steps(view: View, value: Any) -> Result:
    if value == 0 and "warmup_ratio" in view:
        raise NothingToSet("the ratio counts")
    if 0 < value < 1:  # transformers 5
        return ("training", "warmup_ratio"), float(value)
    return ("training", "warmup_steps"), int(value)


def warmup_ratio(view: View, value: Any) -> Result:
    if (view.number("warmup_steps") or 0) > 0:
        raise NothingToSet("warmup_steps counts: transformers prefers it")
    return ("training", "warmup_ratio"), float(value)


def max_steps(view: View, value: Any) -> Result:
    if value <= 0:
        raise NothingToSet("the epochs say it")
    return ("training", "max_steps"), value


def epochs(view: View, value: Any) -> Result:
    if (view.number("max_steps") or 0) > 0:
        raise NothingToSet("max_steps counts: transformers prefers it")
    return ("training", "num_train_epochs"), value


def fraction(view: View, value: Any) -> Result:
    if value == 0:
        raise NothingToSet("no data for evaluation")
    if value >= 1:
        raise WithoutEquivalent("a number of rows; data.eval_fraction is a share, such as 0.1")
    return ("data", "eval_fraction"), value


JOB_WORDS: Mapping[str, Callable[[View, Any], Result]] = {
    "eval_strategy": evaluation,
    "save_strategy": saving,
    "logging_strategy": logging,
    "load_best_model_at_end": best_model,
    "eval_steps": steps_of("eval_steps", "eval_strategy"),
    "save_steps": steps_of("save_steps", "save_strategy"),
    "logging_steps": steps_of("logging_steps", "logging_strategy"),
    "warmup_steps": warmup_steps,
    "warmup_ratio": warmup_ratio,
    "max_steps": max_steps,
    "num_train_epochs": epochs,
    "eval_fraction": fraction,
}


def plain_key(word: str) -> JobKey:
    return JOB_KEYS.get(word) or ("training", word)
