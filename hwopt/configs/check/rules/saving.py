"""Checkpoints, evaluation and the best model."""

from __future__ import annotations

from collections.abc import Iterator

from hwopt.configs.check.contract import TRAINERS, Facts, Finding, rule
from hwopt.configs.view import View

BEST = "load_best_model_at_end"


def strategies(view: View) -> tuple[str, str]:
    """(save, eval) strategies, with the defaults of transformers."""
    return str(view.value("save_strategy", "steps")), str(view.value("eval_strategy", "no"))


@rule("best-model-strategy", "error", words=(BEST,), source="transformers, TrainingArguments", tools=TRAINERS)
def best_model_strategy(view: View, facts: Facts) -> Iterator[Finding]:
    """load_best_model_at_end with another strategy for saving than for evaluation."""
    save, evaluation = strategies(view)
    if not view.is_on(BEST) or save in ("best", evaluation):
        return
    wanted = evaluation if evaluation != "no" else save
    word = "save_strategy" if evaluation != "no" else "eval_strategy"
    given = {word: " (the default)" if word not in view else "" for word in ("save_strategy", "eval_strategy")}
    yield Finding(
        BEST,
        f"save_strategy is {save}{given['save_strategy']}, and eval_strategy is {evaluation}{given['eval_strategy']}.",
        "transformers stops: the best model can be loaded only if it was saved when it was evaluated.",
        view.line(word, wanted),
    )


@rule("best-model-steps", "error", words=(BEST,), source="transformers, TrainingArguments", tools=TRAINERS)
def best_model_steps(view: View, facts: Facts) -> Iterator[Finding]:
    """load_best_model_at_end with checkpoints between two evaluations."""
    save, evaluation = view.number("save_steps"), view.number("eval_steps")
    if not view.is_on(BEST) or strategies(view) != ("steps", "steps") or not save or not evaluation:
        return
    multiple = save / evaluation
    if abs(multiple - round(multiple)) > 1e-9:
        yield Finding(
            "save_steps",
            f"{view.spelled('save_steps')} is {save:g}, no multiple of {view.spelled('eval_steps')} = {evaluation:g}.",
            "transformers stops: a checkpoint must be written where an evaluation is.",
            view.line("save_steps", int(max(1, round(multiple)) * evaluation) if evaluation >= 1 else evaluation),
        )
