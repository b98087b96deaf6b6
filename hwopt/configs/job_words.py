"""Words whose values are not those of a key of a job, words that are left out on purpose, and the defaults of other tools.

Defaults are listed where hwopt has another one. TRL 1.16: sft_config.py and model_config.py in
https://github.com/huggingface/trl/blob/main/trl/trainer; PEFT: https://huggingface.co/docs/peft/package_reference/lora;
axolotl and LLaMA-Factory: the pages in `dialects`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hwopt.config.aliases import INSTEAD, job_key
from hwopt.config.job_training import Training
from hwopt.configs.view import ConfigSetting, Omitted, View, ignored, without
from hwopt.configs.words import names

JobValue = tuple[tuple[str, str], Any]
"""(table, key) of a job, and the value."""
ANSWERS = "hwopt trains the answers of conversations only"
# fmt: off
REASONS = {
    "do_train": "`hwopt run` trains", "do_eval": "a run evaluates if the job names data for it",
    "do_predict": "`hwopt predict` predicts", **dict.fromkeys(("report_to", "logging_dir"), "the run folder has the metrics"),
    "save_safetensors": "hwopt writes safetensors always", "remove_unused_columns": "the job names its columns",
    **dict.fromkeys(("fp16_backend", "half_precision_backend"), "torch's native AMP is the only one"),
    "num_processes": "give --processes N; the rows of a step are counted over all ranks",
    "num_machines": "the launcher's command line says it", "distributed_type": "the plugins of the profile choose the engine",
    "torch_compile_backend": "hwopt compiles with inductor",
    "gradient_checkpointing_kwargs.use_reentrant": "hwopt's checkpointing is never reentrant",
    "logging_nan_inf_filter": "training.on_nonfinite says what follows a loss that is not finite",
    "average_tokens_across_devices": "hwopt divides by the tokens of the whole step, over all ranks",
    "ddp_timeout": "training.hang_timeout ends a run that hangs",
    "ddp_find_unused_parameters": "hwopt's data parallelism needs no search",
    **dict.fromkeys(("log_level", "log_level_replica", "disable_tqdm"), "the command line has its own output"),
    "logging_first_step": "the first step is always logged",
    "include_num_input_tokens_seen": "the log has the tokens of each interval",
    "full_determinism": "a run with the same seed has the same bits: docs/exactness.md",
    "data_seed": "training.seed covers the order of the data",
    "save_only_model": "checkpoints are for resuming; final/ has the model alone",
    "ignore_data_skip": "a resumed run continues at its next batch without skipping",
    "dataset_num_proc": "hwopt tokenizes once and keeps the result in its cache",
    "packing_strategy": "hwopt's pack never cuts a sample", "eval_packing": "hwopt packs training batches only",
    "use_cache": "a cache is for generation; hwopt's training has none",
}
"""Word -> why it is left out on purpose."""
BY_VALUE: Mapping[str, Mapping[Any, JobValue | Omitted]] = {
    "eval_strategy": {
        "epoch": ignored("hwopt evaluates at the end of each epoch by default"), "steps": ignored("training.eval_steps says it"),
        None: without("hwopt evaluates at the end of each epoch if the job has data for it; leave data.eval out")},
    "save_strategy": {
        "no": (("training", "save_minutes"), 0.0), "steps": ignored("training.save_steps says it"),
        "best": ignored("hwopt keeps the best weights by default"),
        None: without("hwopt saves every training.save_minutes (15) minutes, and the best weights at each evaluation")},
    "logging_strategy": {
        "steps": ignored("training.logging_steps says it"), None: without("hwopt logs every training.logging_steps steps")},
    "assistant_only_loss": {True: ignored(ANSWERS), None: without(ANSWERS)},
    "train_on_inputs": {False: ignored(ANSWERS), None: without(ANSWERS)},
    "load_best_model_at_end": {
        True: ignored("final/ holds the best weights by default"),
        None: without("final/ holds the best weights if the job has data for evaluation")},
}
"""Word -> value -> what becomes of it; None: of any other value."""
# fmt: on


def steps(view: View, word: str, value: Any) -> JobValue | Omitted:
    strategy = f"{word.removesuffix('_steps')}_strategy"
    if (chosen := view.value(strategy)) in ("epoch", "no"):
        return ignored(f"{view.spelled(strategy)} is {chosen!r}, so the value has no effect")
    if value < 1:
        return without("a share of the steps; hwopt takes a number of steps")
    return ("training", word), int(value)


def warmup(view: View, word: str, value: Any) -> JobValue | Omitted:
    if word == "warmup_ratio" and (view.number("warmup_steps") or 0) > 0:
        return ignored("warmup_steps counts: transformers prefers it")
    if word == "warmup_steps" and value == 0 and "warmup_ratio" in view:
        return ignored("the ratio counts")
    if word == "warmup_ratio" or 0 < value < 1:  # a share of the steps in transformers 5
        return ("training", "warmup_ratio"), float(value)
    return ("training", "warmup_steps"), int(value)


def length(view: View, word: str, value: Any) -> JobValue | Omitted:
    if word == "max_steps" and value <= 0:
        return ignored("the epochs say it")
    if word == "num_train_epochs" and (view.number("max_steps") or 0) > 0:
        return ignored("max_steps counts: transformers prefers it")
    return ("training", word), value


def fraction(view: View, word: str, value: Any) -> JobValue | Omitted:
    if value == 0:
        return ignored("no data for evaluation")
    if value >= 1:
        return without("a number of rows; data.eval_fraction is a share, such as 0.1")
    return ("data", word), value


def evaluation_split(view: View, word: str, value: Any) -> JobValue | Omitted:
    if view.value("eval_strategy", "no") == "no" or "validation_file" not in view:
        return ignored("the file names no data for evaluation")
    return ("data", "eval_split"), value


def template(view: View, word: str, value: Any) -> JobValue | Omitted:
    if value == "chatml" or str(value).endswith((".jinja", ".j2", ".jinja2", ".txt")):
        return ("data", "chat_template"), value
    return without(f"the template of another tokenizer: save that of {value!r} as a file, for data.chat_template")


def roles(view: View, word: str, value: Any) -> JobValue | Omitted:
    answers = set(value if isinstance(value, list) else [value]) <= {"assistant", "gpt", "model"}
    return ignored(ANSWERS) if answers else without(ANSWERS)


BY_FUNCTION: Mapping[str, Callable[[View, str, Any], JobValue | Omitted]] = {
    **dict.fromkeys(("eval_steps", "save_steps", "logging_steps"), steps),
    **dict.fromkeys(("warmup_steps", "warmup_ratio"), warmup),
    **dict.fromkeys(("max_steps", "num_train_epochs"), length),
    "eval_fraction": fraction,
    "dataset_test_split": evaluation_split,
    "chat_template_path": template,
    "roles_to_train": roles,
}


def job_setting(view: View, word: str, value: Any) -> JobValue | Omitted | None:
    """The key of a job with its value for a setting, or why it has none; None for a plugin's option or an unknown word."""
    if word in ("use_cpu", "trust_remote_code") and not value:
        return ignored("what hwopt does without the setting")
    if word in REASONS:
        return ignored(REASONS[word])
    if (option := INSTEAD.get(word, "")).startswith("--"):
        return ignored(f"give {option} to `hwopt run`")
    if word in BY_VALUE:
        return BY_VALUE[word].get(value, BY_VALUE[word][None])
    if word in BY_FUNCTION:
        return BY_FUNCTION[word](view, word, value)
    key = job_key(word) or (("training", word) if word in Training.model_fields else None)
    return None if key is None else (key, value)


# fmt: off
Defaults = Mapping[str, Any]
"""Word -> value."""
TRAINING_ARGUMENTS: Defaults = {"per_device_train_batch_size": 8, "seed": 42}
SFT_CONFIG: Defaults = {
    **TRAINING_ARGUMENTS, "learning_rate": 2e-5, "max_length": 1024, "bf16": True, "assistant_only_loss": False,
    "gradient_checkpointing": True
}
AXOLOTL: Defaults = {
    "per_device_train_batch_size": 1, "seed": 42, "num_train_epochs": 1, "max_length": 512,
    "lr_scheduler_type": "cosine", "warmup_ratio": 0.03,
}
CHECKPOINTS: Defaults = {"gradient_checkpointing": True}
LLAMA_FACTORY: Defaults = {**TRAINING_ARGUMENTS, **CHECKPOINTS, "max_length": 2048}  # hparams/model_args.py
UNSLOTH: Defaults = {**CHECKPOINTS, "lora_r": 16, "lora_alpha": 16, "load_in_4bit": True,
    "lora_target_modules": sorted(names("q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"))}
"""unsloth/models/llama.py, from_pretrained and get_peft_model."""
LORA_CONFIG: Defaults = {"lora_r": 8, "lora_alpha": 8, "lora_target_modules": "default"}
MODEL_CONFIG: Defaults = {"lora_dropout": 0.05, "lora_target_modules": "default"}
"""TRL's ModelConfig, which its command line reads; its rank and alpha are hwopt's."""
LAST_WEIGHTS: Defaults = {"load_best_model_at_end": False}
"""Where a file has data for evaluation."""
ONCE_QUANTIZED: Defaults = {"bnb_4bit_use_double_quant": False}
SAME = {
    "per_device_train_batch_size": ("effective_batch_size",), "num_train_epochs": ("max_steps",),
    "warmup_ratio": ("warmup_steps",), "bf16": View.HALF, "load_in_4bit": (
        "load_in_8bit", *(f"from_pretrained.{key}" for key in ("full_finetuning", "load_in_16bit", "load_in_fp8"))),
}
"""Word -> others that say the same thing."""
# fmt: on


def defaults_of(view: View) -> Iterator[tuple[str, Defaults]]:
    """(whose, defaults) of the tool that reads the file of `view`; nothing for a script's own words."""
    adapter = view.is_on("use_peft")
    if not view.is_hwopt and ("validation_file" in view or view.number("eval_fraction")):
        yield "transformers", LAST_WEIGHTS
    if view.tool == "axolotl":
        yield "axolotl", AXOLOTL
    elif view.tool == "llama-factory":
        rank = view.value("lora_r", 8)
        yield "LLaMA-Factory", {**LLAMA_FACTORY, **({"lora_r": rank, "lora_alpha": 2 * rank} if adapter else {})}
    elif view.tool == "transformers":
        if view.is_unsloth and adapter:
            yield "Unsloth", UNSLOTH
        if view.value("task") == "causal-lm":
            yield "SFTConfig", SFT_CONFIG
        elif view.source.calls or "output_dir" in view:
            yield "TrainingArguments", TRAINING_ARGUMENTS
        if view.is_on("load_in_4bit") and not view.is_unsloth:
            yield ("BitsAndBytesConfig" if view.source.calls else "ModelConfig"), ONCE_QUANTIZED
        if adapter:
            yield ("LoraConfig", LORA_CONFIG) if view.source.calls else ("ModelConfig", MODEL_CONFIG)


def add_defaults(view: View) -> None:
    """Add to `view` the values that its tool takes for words that the file does not give."""
    for whose, defaults in list(defaults_of(view)):
        for word, value in defaults.items():
            if view.lacks(word, *SAME.get(word, ())):
                said = f"the default of {whose}"
                view.settings[word] = ConfigSetting((view.spelling(word),), value, 0, said, said, word=word)
