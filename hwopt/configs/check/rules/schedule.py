"""The learning-rate schedule, clipping, early stopping, and which model is the best."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import ceil

from hwopt.configs.check import TRANSFORMERS, Facts, Finding, rule
from hwopt.configs.python_file import PATIENCE
from hwopt.configs.view import View
from hwopt.configs.words import names

LEAST, USUAL, MOST, ENOUGH = 0.03, 0.06, 0.10, 100
"""docs/notes.md#rtx-3070-64-rows: 3 to 10 %. So many steps are enough for a long run too, in whose share they are small."""
BEST, METRIC, GREATER = "load_best_model_at_end", "metric_for_best_model", "greater_is_better"
SMALLER = names("loss perplexity ppl wer cer mse rmse mae mape error")
LARGER = names("accuracy accuracies acc f1 precision recall auc mcc bleu sacrebleu rouge rouge1 rouge2 rougel rougelsum margins")
"""Parts of the names of metrics of which a smaller, or a larger, value is better."""


def total_steps(view: View, facts: Facts) -> int | None:
    """Optimizer steps of the run, if the file or the data's size says it. The number of packed rows is not known."""
    if (steps := view.number("max_steps")) is not None and steps > 0:
        return int(steps)
    epochs, rows = view.number("num_train_epochs"), view.effective_rows
    if epochs is None or rows is None or facts.rows is None or view.is_on("packing"):
        return None
    return int(epochs * ceil(facts.rows / rows))


@rule("warmup-share", "warning", words=("warmup_ratio", "warmup_steps"), source="notes.md#rtx-3070-64-rows: 3-10 %")
def warmup_share(view: View, facts: Facts) -> Iterator[Finding]:
    """The warm-up is shorter than 3 % or longer than 10 % of the run; an error if it is as long as the run."""
    steps, ratio, total = view.number("warmup_steps"), view.number("warmup_ratio"), total_steps(view, facts)
    word, share, usual = "warmup_steps" if steps else "warmup_ratio", steps or ratio or 0, USUAL  # steps count before a ratio
    if steps and steps >= 1:  # below 1 it is a share too, since transformers 5
        if total is None:
            return
        share, usual = steps / total, max(1, round(USUAL * total))
    if share <= 0 or LEAST <= round(share, 6) <= MOST or (share < LEAST and share * (total or 0) >= ENOUGH):
        return
    effect = "Steps with a low rate are lost." if share > MOST else "Adam's first steps are noisy at the full rate."
    if share >= 1:
        effect = "The run ends before the learning rate is reached."
    what = f"The warm-up takes {share:.1%} of the run; 3 to 10 % are usual."
    yield Finding(word, what, effect, view.line(word, usual), "error" if share >= 1 else None)


@rule("no-clipping", "warning", words=("max_grad_norm", "zero_stage"), source="transformers and DeepSpeed: their defaults")
def no_clipping(view: View, facts: Facts) -> Iterator[Finding]:
    """Gradients are not clipped: max_grad_norm is 0, or a file of DeepSpeed has no gradient_clipping."""
    key = view.spelled("max_grad_norm")
    unsaid = view.tool == "deepspeed" and "max_grad_norm" not in view and key not in {each.key for each in view.unread}
    if unsaid or view.number("max_grad_norm") == 0:
        what = f"{key} is 0{', the default of DeepSpeed' if unsaid else ''}: gradients are not clipped."
        why = "One bad batch can undo the training so far; 1.0 is usual."
        yield Finding("zero_stage" if unsaid else "max_grad_norm", what, why, view.line("max_grad_norm", 1.0), key=key)


@rule("best-model", "error", words=(BEST,), source="transformers, TrainingArguments", tools=TRANSFORMERS)
def best_model(view: View, facts: Facts) -> Iterator[Finding]:
    """load_best_model_at_end with checkpoints that are not written where the model is evaluated."""
    if not view.is_on(BEST) or any(word not in view and not view.lacks(word) for word in ("save_strategy", "eval_strategy")):
        return
    why = "transformers stops: the best model can be loaded only if it was saved when it was evaluated."
    save, evaluation = str(view.value("save_strategy", "steps")), str(view.value("eval_strategy", "no"))
    if save not in ("best", evaluation):
        word, wanted = ("eval_strategy", save) if evaluation == "no" else ("save_strategy", evaluation)
        what = f"save_strategy is {save}, and eval_strategy is {evaluation} (their defaults: steps and no)."
        yield Finding(BEST, what, why, view.line(word, wanted))
    every, between = view.number("save_steps"), view.number("eval_steps")
    mixed = every and between and (every < 1) != (between < 1)  # a share of the steps and a number of steps
    if save == evaluation == "steps" and every and between and (mixed or abs(every / between - round(every / between)) > 1e-9):
        what = f"{view.spelled('save_steps')} is {every:g}, not a multiple of {view.spelled('eval_steps')} = {between:g}."
        wanted_steps = between if mixed else max(1, round(every / between)) * between
        yield Finding("save_steps", what, why, view.line("save_steps", wanted_steps))


@rule("worst-model", "error", words=(METRIC,), source="transformers, TrainingArguments: greater_is_better")
def worst_model(view: View, facts: Facts) -> Iterator[Finding]:
    """greater_is_better, or its default, is wrong for metric_for_best_model."""
    name, given = str(view.value(METRIC)), view.value(GREATER)
    parts = set(re.split(r"[\W_]+", name.lower()))
    smaller, larger = bool(parts & SMALLER), bool(parts & LARGER)
    if smaller == larger or (given is None and (view.is_hwopt or not view.lacks(GREATER))):
        return
    taken = given if given is not None else not name.endswith("loss")
    if taken is not larger:
        by_default = "" if given is not None else " by default"
        what = f"{view.spelled(GREATER)} is {str(taken).lower()}{by_default}, and {view.spelled(METRIC)} is {name}."
        why = f"A {'larger' if larger else 'smaller'} value of the metric is better: the worst model is kept."
        yield Finding(METRIC if by_default else GREATER, what, why, view.line(GREATER, larger))


@rule("early-stopping", "error", words=(PATIENCE,), source="transformers, EarlyStoppingCallback", tools=TRANSFORMERS)
def early_stopping(view: View, facts: Facts) -> Iterator[Finding]:
    """Early stopping without evaluations, without a metric, or a warning if the best model is not loaded at the end."""
    complete = view.tool == "llama-factory" or (view.source.language == "Python" and " (the first of" not in view.source.calls[0])

    def is_off(word: str, off: object) -> bool:
        return view.value(word) == off if word in view else complete and view.lacks(word)

    stops, plateau = "EarlyStoppingCallback stops the run at its start: it needs", ("reduce_lr_on_plateau", "greedy")
    if not view.number(PATIENCE):
        return
    if is_off("eval_strategy", "no"):
        fix = view.line("eval_strategy", "epoch")
        yield Finding(PATIENCE, "Early stopping without evaluations.", f"{stops} eval_strategy.", fix)
    elif is_off(BEST, False) and is_off(METRIC, None) and view.value("lr_scheduler_type") not in plateau:
        yield Finding(PATIENCE, "Early stopping without a metric.", f"{stops} {METRIC}.", view.line(BEST, True))
    elif is_off(BEST, False):
        what = f"Early stopping, and {view.spelled(BEST)} is not on."
        why = "The run ends with its last weights, which are the worse ones that it stopped for."
        yield Finding(PATIENCE, what, why, view.line(BEST, True), "warning")
