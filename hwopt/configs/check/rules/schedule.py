"""The learning-rate schedule, the length of the run, and clipping."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from hwopt.configs.check.contract import Facts, Finding, rule
from hwopt.configs.view import View

LEAST, MOST = 0.03, 0.10
"""docs/notes.md#rtx-3070-64-rows: 3 to 10 %."""


def total_steps(view: View, facts: Facts) -> int | None:
    """Optimizer steps of the run, if the file or the data's size says it."""
    if (steps := view.number("max_steps")) is not None and steps > 0:
        return int(steps)
    epochs, rows = view.number("num_train_epochs"), view.effective_rows
    if epochs is None or rows is None or facts.rows is None:
        return None
    return int(epochs * ceil(facts.rows / rows))


def warmup(view: View, facts: Facts) -> tuple[str, float] | None:
    """(word, share of the run) of the warm-up; None if it is unknown or 0. Steps count before a ratio."""
    steps, ratio, total = view.number("warmup_steps"), view.number("warmup_ratio"), total_steps(view, facts)
    if steps is not None and 0 < steps < 1:
        return "warmup_steps", steps
    if steps and total:
        return "warmup_steps", steps / total
    return ("warmup_ratio", ratio) if ratio and not steps else None


@rule("warmup-share", "warning", words=("warmup_ratio", "warmup_steps"), source="notes.md#rtx-3070-64-rows: 3-10 %")
def warmup_share(view: View, facts: Facts) -> Iterator[Finding]:
    """The warm-up is shorter than 3 % or longer than 10 % of the run."""
    found = warmup(view, facts)
    if found is None or LEAST <= round(found[1], 6) <= MOST or found[1] >= 1:
        return
    word, share = found
    effect = "Steps with a low rate are lost." if share > MOST else "Adam's first steps are noisy at the full rate."
    total = total_steps(view, facts)
    fix = (
        view.line(word, round(0.06 * total)) if word == "warmup_steps" and total and share * total >= 1 else view.line(word, 0.06)
    )
    yield Finding(word, f"The warm-up takes {share:.1%} of the run; 3 to 10 % are usual.", effect, fix)


@rule("warmup-beyond-run", "error", words=("warmup_ratio", "warmup_steps"), source="transformers, get_scheduler")
def warmup_beyond_run(view: View, facts: Facts) -> Iterator[Finding]:
    """The warm-up is as long as the run or longer."""
    found = warmup(view, facts)
    if found is not None and found[1] >= 1:
        total = total_steps(view, facts)
        length = (
            f"{view.number('warmup_steps'):g} of {total} steps" if total and found[0] == "warmup_steps" else f"{found[1]:.0%}"
        )
        yield Finding(
            found[0],
            f"The warm-up takes {length}.",
            "The run ends before the learning rate is reached.",
            view.line(found[0], max(1, round(0.06 * total)) if total and found[0] == "warmup_steps" else 0.06),
        )


@rule("warmup-twice", "warning", words=("warmup_ratio",), source="transformers: warmup_steps overrides warmup_ratio")
def warmup_twice(view: View, facts: Facts) -> Iterator[Finding]:
    """A warm-up ratio beside warm-up steps, which override it."""
    if view.number("warmup_ratio") and (steps := view.number("warmup_steps")):
        yield Finding(
            "warmup_ratio",
            f"{view.spelled('warmup_ratio')} is given beside {view.spelled('warmup_steps')} = {steps:g}.",
            "The steps count, and the ratio has no effect.",
            f"remove {view.spelled('warmup_ratio')}",
        )


@rule("steps-and-epochs", "information", words=("max_steps",), source="transformers: max_steps overrides num_train_epochs")
def steps_and_epochs(view: View, facts: Facts) -> Iterator[Finding]:
    """A number of steps beside a number of epochs, which it overrides."""
    steps, epochs = view.number("max_steps"), view.number("num_train_epochs")
    if steps is not None and steps > 0 and epochs is not None:
        yield Finding(
            "num_train_epochs",
            f"{view.spelled('num_train_epochs')} = {epochs:g} beside {view.spelled('max_steps')} = {steps:g}.",
            "The run ends after the steps; the epochs have no effect.",
            f"remove {view.spelled('num_train_epochs')}",
        )


@rule(
    "no-clipping",
    "warning",
    words=("max_grad_norm", "zero_stage"),
    source="transformers, max_grad_norm; DeepSpeed, gradient_clipping",
)
def no_clipping(view: View, facts: Facts) -> Iterator[Finding]:
    """Gradients are not clipped."""
    if view.number("max_grad_norm") == 0:
        what = f"{view.spelled('max_grad_norm')} is 0: gradients are not clipped."
    elif (
        view.tool == "deepspeed"
        and "max_grad_norm" not in view
        and view.spelled("max_grad_norm") not in {each.key for each in view.unread}
    ):
        what = "The file has no gradient_clipping, and DeepSpeed's default is 0: gradients are not clipped."
    else:
        return
    word = "max_grad_norm" if "max_grad_norm" in view else "zero_stage"
    fix = view.line("max_grad_norm", 1.0)
    yield Finding(word, what, "One bad batch can undo the training so far; 1.0 is usual.", fix, key=view.spelled("max_grad_norm"))


@rule("nonfinite-filter", "information", words=("logging_nan_inf_filter",), source="transformers, logging_nan_inf_filter")
def nonfinite_filter(view: View, facts: Facts) -> Iterator[Finding]:
    """The log hides losses that are not finite."""
    if view.is_on("logging_nan_inf_filter"):
        yield Finding(
            "logging_nan_inf_filter",
            "logging_nan_inf_filter is true.",
            "A loss that is NaN or infinite is logged as the mean of the others, so that a broken run looks sound.",
            view.line("logging_nan_inf_filter", False),
        )
