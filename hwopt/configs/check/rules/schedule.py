"""The learning-rate schedule, clipping, and when the best model is saved."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from hwopt.configs.check.contract import TRAINERS, Facts, Finding, rule
from hwopt.configs.view import View

LEAST, USUAL, MOST = 0.03, 0.06, 0.10
"""docs/notes.md#rtx-3070-64-rows: 3 to 10 %."""
BEST = "load_best_model_at_end"


def total_steps(view: View, facts: Facts) -> int | None:
    """Optimizer steps of the run, if the file or the data's size says it."""
    if (steps := view.number("max_steps")) is not None and steps > 0:
        return int(steps)
    epochs, rows = view.number("num_train_epochs"), view.effective_rows
    if epochs is None or rows is None or facts.rows is None:
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
    if share <= 0 or LEAST <= round(share, 6) <= MOST:
        return
    effect = "Steps with a low rate are lost." if share > MOST else "Adam's first steps are noisy at the full rate."
    if share >= 1:
        effect = "The run ends before the learning rate is reached."
    what = f"The warm-up takes {share:.1%} of the run; 3 to 10 % are usual."
    yield Finding(word, what, effect, view.line(word, usual), "error" if share >= 1 else None)


@rule(
    "no-clipping",
    "warning",
    words=("max_grad_norm", "zero_stage"),
    source="transformers, max_grad_norm; DeepSpeed, gradient_clipping",
)
def no_clipping(view: View, facts: Facts) -> Iterator[Finding]:
    """Gradients are not clipped: max_grad_norm is 0, or a file of DeepSpeed has no gradient_clipping."""
    key = view.spelled("max_grad_norm")
    unsaid = view.tool == "deepspeed" and "max_grad_norm" not in view and key not in {each.key for each in view.unread}
    if unsaid or view.number("max_grad_norm") == 0:
        yield Finding(
            "zero_stage" if unsaid else "max_grad_norm",
            f"{key} is 0{', the default of DeepSpeed' if unsaid else ''}: gradients are not clipped.",
            "One bad batch can undo the training so far; 1.0 is usual.",
            view.line("max_grad_norm", 1.0),
            key=key,
        )


@rule("best-model", "error", words=(BEST,), source="transformers, TrainingArguments", tools=TRAINERS)
def best_model(view: View, facts: Facts) -> Iterator[Finding]:
    """load_best_model_at_end with checkpoints that are not written where the model is evaluated."""
    if not view.is_on(BEST):
        return
    why = "transformers stops: the best model can be loaded only if it was saved when it was evaluated."
    save, evaluation = str(view.value("save_strategy", "steps")), str(view.value("eval_strategy", "no"))
    if save not in ("best", evaluation):
        word, wanted = ("eval_strategy", save) if evaluation == "no" else ("save_strategy", evaluation)
        what = f"save_strategy is {save}, and eval_strategy is {evaluation} (their defaults: steps and no)."
        yield Finding(BEST, what, why, view.line(word, wanted))
    every, between = view.number("save_steps"), view.number("eval_steps")
    if save == evaluation == "steps" and every and between and abs(every / between - round(every / between)) > 1e-9:
        what = f"{view.spelled('save_steps')} is {every:g}, not a multiple of {view.spelled('eval_steps')} = {between:g}."
        wanted_steps = max(1, round(every / between)) * between
        yield Finding("save_steps", what, why, view.line("save_steps", wanted_steps))
