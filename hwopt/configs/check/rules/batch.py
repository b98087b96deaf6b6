"""Batch sizes, the rows of an optimizer step, and the learning rate that belongs to them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import ceil, gcd, sqrt

from hwopt.configs.check import Facts, Finding, rule
from hwopt.configs.view import WITH_TRAINER, View, is_number
from hwopt.text import counted

TRAIN, EVAL, ACCUMULATION = "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"
MOST_EVAL_RATIO = 4
"""Evaluation keeps no activations for a backward pass, so a few times the training batch fits."""
ROWS_OF_A_STEP = ((10_000, 64), (1_000, 16), (0, 8))
"""(rows of the data from which it counts, smallest usual step), the largest first. 64 to 128 for 20k rows:
docs/notes.md#rtx-3070-16-or-32-rows."""
UNKNOWN_DATA_ROWS = 16
"""Smallest usual step if the data's size is unknown: Devlin et al. 2019, appendix A.3, fine-tune with 16 and 32."""
TOKENS_OF_A_STEP = 8_192
"""A step with so many tokens is large enough whatever its rows: packed or long samples."""
USUAL_RATE, USUAL_ROWS, ADAPTER_FACTOR, FAR = 3e-5, 32, 10.0, 8.0
"""Learning rate of fine-tuning with AdamW at that many rows a step (Devlin et al. 2019: 2e-5 to 5e-5), ten times that for LoRA
(Hu et al. 2022: 2e-4), and the factor beyond which a rate is far from it."""

LARGE = 13
"""Billions of parameters whose weights, gradients and Adam states, 16 bytes each, no card holds."""
SMALL = re.compile(r"-(\d{2,3}m|0?\.\d+b)\b|t5\b", re.IGNORECASE)
"""Names of language models below 1 B parameters: SmolLM-360M is fine-tuned with 1e-3."""
FROM_SCRATCH = {"config_name", "config_overrides", "model_type"}
"""Keys of files that train a model without weights, unless they name a model too."""


@rule("eval-batch", "warning", words=(EVAL,), source="notes.md#rtx-3070-16-or-32-rows: 192 for a training batch of 16")
def eval_batch(view: View, facts: Facts) -> Iterator[Finding]:
    """The evaluation batch is more than 4 times the training batch."""
    train, evaluation = view.number(TRAIN), view.number(EVAL)
    if train and evaluation and evaluation > MOST_EVAL_RATIO * train:
        what = f"{view.spelled(EVAL)} is {evaluation:g}, {evaluation / train:g} times the training batch of {train:g}."
        why = "Evaluation can run out of memory although training fits. 2 times the training batch is usual."
        yield Finding(EVAL, what, why, view.line(EVAL, int(2 * train)))


@rule("step-rows-small", "warning", words=(TRAIN,), source="notes.md#rtx-3070-16-or-32-rows: effective batch 16 for 20k samples")
def step_rows_small(view: View, facts: Facts) -> Iterator[Finding]:
    """An optimizer step has few rows for the size of the data."""
    effective, steps, rows = view.effective_rows, view.number(ACCUMULATION), facts.rows
    if effective is None or view.train_rows is None or steps is None or view.is_on("packing"):
        return
    if ranks_unknown(view) or view.preferences or any("layerwise" in entry.key for entry in view.source.entries):
        return
    tokens = effective * (view.number("max_length") or 0)
    if tokens >= TOKENS_OF_A_STEP and rows is None and view.value("task") != "text-classification":
        return
    smallest = UNKNOWN_DATA_ROWS if rows is None else next(least for size, least in ROWS_OF_A_STEP if rows >= size)
    if effective < smallest:
        data = f"{rows:,} rows of data" if rows is not None else "fine-tuning"
        fix = {ACCUMULATION: ceil(smallest / effective * steps)}
        if "effective_batch_size" in view and not view.is_hwopt:
            fix["effective_batch_size"] = fix[ACCUMULATION] * view.train_rows * view.ranks
        what = f"An optimizer step has {counted(effective, 'row')}; {smallest} or more are usual for {data}."
        why = "Gradients of few rows are noisy; more accumulation gives larger steps in the same memory."
        yield Finding(ACCUMULATION, what, why, view.lines(fix))


@rule("step-rows-changed", "warning", words=(TRAIN,), source="notes.md#rtx-3070-64-rows: 48 x 3 = 144 instead of 64 x 2 = 128")
def step_rows_changed(view: View, facts: Facts) -> Iterator[Finding]:
    """A smaller or larger batch, by its comment or an earlier line, changes the rows of an optimizer step."""
    before, train, steps = former(view, TRAIN), view.train_rows, int(view.number(ACCUMULATION) or 1)
    if before is None or train is None or before == train:
        return
    steps_before = former(view, ACCUMULATION) or steps
    earlier, now = before * steps_before, train * steps
    if earlier != now:
        rows = next((rows for rows in range(train, 0, -1) if earlier % rows == 0), 1)
        fix = {TRAIN: rows, ACCUMULATION: earlier // rows} if rows != train else {ACCUMULATION: earlier // rows}
        what = f"{train} x {steps} = {now} rows in a step; before {before} x {steps_before} = {earlier}."
        why = "Another number of rows in a step is another training: learning rate and warm-up no longer fit."
        yield Finding(TRAIN, what, why, view.lines(fix))


def former(view: View, word: str) -> int | None:
    """The value that the setting had before, by an earlier line of the file or by its comment ("instead of 64", "was 192")."""
    if (setting := view.settings.get(word)) is None:
        return None
    if earlier := [each.value for each in view.source.replaced if each.path == setting.path]:
        return int(earlier[-1]) if is_number(earlier[-1]) else None
    match = re.search(r"\b(?:instead of|was|from)\s+(\d+)\b", setting.comment)
    return int(match[1]) if match else None


@rule("step-rows-contradict", "error", words=("effective_batch_size",), source="DeepSpeed: micro x steps x ranks")
def step_rows_contradict(view: View, facts: Facts) -> Iterator[Finding]:
    """The rows of a step are not a multiple of micro-batch and accumulation."""
    word = "effective_batch_size"
    effective, train, steps = view.number(word), view.number(TRAIN), view.number(ACCUMULATION)
    if effective and train and steps and effective % (train * steps):
        what = f"{view.spelled(word)} is {effective:g}, not a multiple of {train:g} x {steps:g} = {train * steps:g}."
        why = "DeepSpeed refuses to start: the product of both with the number of ranks must be the rows of a step."
        yield Finding(word, what, why, view.line(word, int(train * steps * view.ranks)))


@rule("completion-groups", "warning", source="TRL, GRPOConfig: generation_batch_size", tools=("transformers",))
def completion_groups(view: View, facts: Facts) -> Iterator[Finding]:
    """The completions of a GRPO step are not whole groups of num_generations; a note where several processes are usual."""
    setting, rows, steps = view.found("num_generations"), view.effective_rows, int(view.number(ACCUMULATION) or 1)
    size = setting.value if setting else 8 * ("GRPOConfig" in view.source.calls and view.lacks("num_generations"))
    known = rows and isinstance(size, int) and size > 0 and view.lacks("generation_batch_size", "steps_per_generation")
    if known and rows and rows % size and not view.is_unsloth:  # which makes the batch larger
        what = f"{rows} completions of a process are not whole groups of num_generations = {size}."
        why = f"TRL stops unless the number of processes is a multiple of {size // gcd(rows, size)}."
        least, word = size // gcd(rows // steps, size), "num_generations" if setting else TRAIN
        fix = view.line(ACCUMULATION, ceil(steps / least) * least)
        yield Finding(word, what, why, fix, "warning" if view.source.language == "Python" else "information")


def ranks_unknown(view: View) -> bool:
    """Whether the file trains on several ranks, as FSDP and DeepSpeed do, and does not say on how many."""
    keys = {part for entry in view.source.entries if entry.value for part in (entry.path[0], entry.path[-1])}
    large = re.search(r"(?i)(?<![\d.])(\d{2,3})b(?![a-z])", str(view.value("model_name_or_path")))
    alone = not large or int(large[1]) < LARGE or view.adapter is not False
    several = view.tool == "deepspeed" or not alone or keys & {"fsdp", "fsdp_config", "deepspeed", "dist_config", "_component_"}
    return bool(several) and "num_processes" not in view and not view.is_hwopt


def has_usual_rate(view: View) -> bool:
    """Whether AdamW's usual rates hold: not from scratch, or if the adapter is unknown; below 1 B only for preferences."""
    keys = {entry.path[-1]: entry.value for entry in view.source.entries}
    pretrains = keys.get("stage") == "pt" or keys.get("pretraining_dataset") or keys.get("load_pretrained_weights") is False
    from_scratch = "model_name_or_path" not in view and keys.keys() & FROM_SCRATCH
    projected = any(keys.get(key) for key in ("use_galore", "use_apollo", "use_badam", "use_muon"))  # of LLaMA-Factory
    small = SMALL.search(str(view.value("model_name_or_path"))) and (view.rewards or not view.preferences)
    silent = view.tool == "transformers" and view.source.language != "Python" and view.lacks("use_peft", "task")
    by_script = silent and (view.number("max_length") or 0) >= 1024  # a script of its own may add the adapter
    other = silent and WITH_TRAINER.isdisjoint(keys) and "lora" not in "".join(keys)  # such as of images
    unread = view.source.language == "Python" and not view.is_on("use_peft") and not view.lacks("use_peft")
    remote = view.tool == "axolotl" and view.adapter is None  # a plugin trains its own adapter
    return not (pretrains or from_scratch or projected or small or by_script or unread or remote or other)


@rule("learning-rate", "warning", words=("learning_rate",), source="Devlin et al. 2019, A.3; Malladi et al. 2022")
def learning_rate(view: View, facts: Facts) -> Iterator[Finding]:
    """The learning rate is far from what is usual for the rows of a step."""
    rate, rows = view.number("learning_rate"), view.effective_rows
    # quantized weights are trained with an adapter only: `quantized-training`
    adapter = view.adapter or view.is_on("load_in_4bit") or view.is_on("load_in_8bit")
    adapter = adapter or (view.adapter is None and ("lora_alpha" in view or "lora_r" in view))
    if ranks_unknown(view) or not has_usual_rate(view):
        return
    if rate is None or not 0 < rate <= 1 or rows is None or "adam" not in str(view.value("optim", "adamw")):
        return
    usual = USUAL_RATE * sqrt(rows / USUAL_ROWS) * (ADAPTER_FACTOR if adapter else 1.0)
    preferences = view.preferences and not view.rewards
    if rate > usual * FAR / 2 and preferences:
        what = f"{view.spelled('learning_rate')} is {rate:g}; preferences take less than the {usual:.1g} of other data."
        why = "Training can diverge. TRL's default for DPO is 1e-6, and recipes take 5e-7 to 5e-5."
        yield Finding("learning_rate", what, why, view.line("learning_rate", 5e-6 if adapter else 1e-6))
    elif not usual / FAR <= rate <= usual * FAR and not preferences:
        method = f"{'an adapter' if adapter else 'all weights'} and {counted(rows, 'row')} in a step"
        effect = "Training can diverge." if rate > usual else "Training can stop short of the best metric."
        what = f"{view.spelled('learning_rate')} is {rate:g}; about {usual:.1g} is usual for {method}."
        why = f"{effect} With Adam the rate grows with the square root of the rows."
        yield Finding("learning_rate", what, why, view.line("learning_rate", float(f"{usual:.1g}")))
