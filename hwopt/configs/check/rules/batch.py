"""Batch sizes, the rows of an optimizer step, and the learning rate that belongs to them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import ceil, sqrt

from hwopt.configs.check.contract import Facts, Finding, rule
from hwopt.configs.view import ConfigSetting, View

TRAIN, EVAL, ACCUMULATION = "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"
MOST_EVAL_RATIO = 4
"""Evaluation keeps no activations for a backward pass, so a few times the training batch fits."""
ROWS_OF_A_STEP = ((10_000, 64), (1_000, 16), (0, 8))
"""(rows of the data from which it counts, smallest usual step), the largest first. 64 to 128 for 20k rows:
docs/notes.md#rtx-3070-16-or-32-rows."""
UNKNOWN_DATA_ROWS = 32
"""Smallest usual step if the data's size is unknown: Devlin et al. 2019, appendix A.3, fine-tune with 16 and 32."""
TOKENS_OF_A_STEP = 8_192
"""A step with so many tokens is large enough whatever its rows: packed or long samples."""
USUAL_RATE, USUAL_ROWS, ADAPTER_FACTOR, FAR = 3e-5, 32, 10.0, 8.0
"""Learning rate of fine-tuning with AdamW at that many rows a step (Devlin et al. 2019: 2e-5 to 5e-5), ten times that for LoRA
(Hu et al. 2022: 2e-4), and the factor beyond which a rate is far from it."""


@rule("eval-batch", "warning", words=(EVAL,), source="notes.md#rtx-3070-16-or-32-rows: 192 for a training batch of 16")
def eval_batch(view: View, facts: Facts) -> Iterator[Finding]:
    """The evaluation batch is more than 4 times the training batch."""
    train, evaluation = view.number(TRAIN), view.number(EVAL)
    if train and evaluation and evaluation > MOST_EVAL_RATIO * train:
        yield Finding(
            EVAL,
            f"{view.spelled(EVAL)} is {evaluation:g}, {evaluation / train:g} times the training batch of {train:g}.",
            "Evaluation can run out of memory although training fits. 2 times the training batch is usual.",
            view.line(EVAL, int(2 * train)),
        )


@rule("step-rows-small", "warning", words=(TRAIN,), source="notes.md#rtx-3070-16-or-32-rows: effective batch 16 for 20k samples")
def step_rows_small(view: View, facts: Facts) -> Iterator[Finding]:
    """An optimizer step has few rows for the size of the data."""
    train, effective = view.train_rows, view.effective_rows
    if train is None or effective is None or view.is_on("packing") or view.number(ACCUMULATION) is None:
        return
    length = view.number("max_length") or 0
    if effective * length >= TOKENS_OF_A_STEP and facts.rows is None and view.value("task") != "text-classification":
        return
    rows = facts.rows
    smallest = UNKNOWN_DATA_ROWS if rows is None else next(least for size, least in ROWS_OF_A_STEP if rows >= size)
    if effective < smallest:
        data = f"{rows:,} rows of data" if rows is not None else "fine-tuning"
        steps = ceil(smallest / effective * (view.number(ACCUMULATION) or 1))
        fix = view.line(ACCUMULATION, steps)
        if "effective_batch_size" in view and not view.is_hwopt:
            fix += f" and {view.line('effective_batch_size', steps * train * view.ranks)}"
        yield Finding(
            ACCUMULATION,
            f"An optimizer step has {effective} rows; {smallest} or more are usual for {data}.",
            "Gradients of few rows are noisy; more accumulation gives larger steps in the same memory.",
            fix,
        )


@rule("step-rows-changed", "warning", words=(TRAIN,), source="notes.md#rtx-3070-64-rows: 48 x 3 = 144 instead of 64 x 2 = 128")
def step_rows_changed(view: View, facts: Facts) -> Iterator[Finding]:
    """A smaller or larger batch, by its comment or an earlier line, changes the rows of an optimizer step."""
    before = former(view.settings[TRAIN]) if TRAIN in view else None
    train, accumulation = view.train_rows, int(view.number(ACCUMULATION) or 1)
    if before is None or train is None or before == train:
        return
    accumulated = former(view.settings[ACCUMULATION]) if ACCUMULATION in view else None
    earlier, now = before * (accumulated or accumulation), train * accumulation
    if earlier == now:
        return
    steps, exact = divmod(earlier, train)
    rows = next((rows for rows in range(train, 0, -1) if earlier % rows == 0), 1)
    fix = (
        view.line(ACCUMULATION, steps)
        if not exact
        else f"{view.line(TRAIN, rows)} and {view.line(ACCUMULATION, earlier // rows)}"
    )
    yield Finding(
        TRAIN,
        f"{train} x {accumulation} = {now} rows in a step; before {before} x {accumulated or accumulation} = {earlier}.",
        "Another number of rows in a step is another training: learning rate and warm-up no longer fit.",
        fix,
    )


def former(setting: ConfigSetting) -> int | None:
    """The value that the setting had before, by an earlier line of the file or by its comment ("instead of 64", "was 192")."""
    if setting.former:
        found = setting.former[-1]
        return int(found) if isinstance(found, int | float) else None
    match = re.search(r"\b(?:instead of|was|from)\s+(\d+)\b", setting.comment)
    return int(match[1]) if match else None


@rule(
    "step-rows-contradict", "error", words=("effective_batch_size",), source="DeepSpeed: train_batch_size = micro x steps x ranks"
)
def step_rows_contradict(view: View, facts: Facts) -> Iterator[Finding]:
    """The rows of a step are not a multiple of micro-batch and accumulation."""
    effective, train = view.number("effective_batch_size"), view.number(TRAIN)
    steps = view.number(ACCUMULATION)
    if not effective or not train or not steps or effective % (train * steps) == 0:
        return
    yield Finding(
        "effective_batch_size",
        f"{view.spelled('effective_batch_size')} is {effective:g}, no multiple of {train:g} x {steps:g} = {train * steps:g}.",
        "DeepSpeed refuses to start: the product of both with the number of ranks must be the rows of a step.",
        view.line("effective_batch_size", int(train * steps * view.ranks)),
    )


@rule(
    "batch-search",
    "warning",
    words=("auto_find_batch_size",),
    source="transformers, auto_find_batch_size",
    tools=("transformers", "llama-factory"),
)
def batch_search(view: View, facts: Facts) -> Iterator[Finding]:
    """auto_find_batch_size changes the rows of a step when memory runs out."""
    if view.is_on("auto_find_batch_size"):
        yield Finding(
            "auto_find_batch_size",
            "auto_find_batch_size lowers the batch after an out-of-memory error, and not the accumulation.",
            "The rows of a step then depend on the card's free memory: two runs of one file differ.",
            f"{view.line('auto_find_batch_size', False)}, with a batch that fits and more accumulation",
        )


@rule("batch-power-of-two", "information", words=(TRAIN,), source="notes.md#rtx-3070-64-rows: power of 2 is better")
def batch_power_of_two(view: View, facts: Facts) -> Iterator[Finding]:
    """The batch is not a power of two, which by itself costs nothing."""
    train = view.train_rows
    if train and train & (train - 1):
        yield Finding(
            TRAIN,
            f"{view.spelled(TRAIN)} is {train}, no power of 2.",
            "No change is needed: tensor cores want hidden sizes and token counts in multiples of 8, not batches in powers of 2.",
        )


@rule(
    "learning-rate", "warning", words=("learning_rate",), source="Devlin et al. 2019, A.3; Malladi et al. 2022 (arXiv:2205.10287)"
)
def learning_rate(view: View, facts: Facts) -> Iterator[Finding]:
    """The learning rate is far from what is usual for the rows of a step."""
    rate, rows = view.number("learning_rate"), view.effective_rows
    adamw = "adam" in str(view.value("optim", "adamw"))
    adapter_unknown = not view.is_on("use_peft") and not view.lacks("use_peft") and view.language == "Python"
    if rate is None or rows is None or not adamw or adapter_unknown:
        return
    usual = USUAL_RATE * sqrt(rows / USUAL_ROWS) * (ADAPTER_FACTOR if view.is_on("use_peft") else 1.0)
    if usual / FAR <= rate <= usual * FAR:
        return
    method = "an adapter" if view.is_on("use_peft") else "all weights"
    effect = "Training can diverge." if rate > usual else "Training can stop short of the best metric."
    yield Finding(
        "learning_rate",
        f"{view.spelled('learning_rate')} is {rate:g}; about {usual:.1g} is usual for {method} and {rows} rows in a step.",
        f"{effect} With Adam the rate grows with the square root of the rows.",
        view.line("learning_rate", float(f"{usual:.1g}")),
    )
