"""BestModel: the best weights so far, by one metric, in `best-<step>/` of the run folder."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from hwopt.config.job_training import Training
from hwopt.errors import InputError
from hwopt.saving.reader import best_folder, load_checkpoint, quarantine
from hwopt.saving.savable_run import SavableRun, named_by_class, restore_parts
from hwopt.saving.writer import AsyncWriter
from hwopt.system.atomic_folder import find_corruption
from hwopt.tensor_tree import HostCopies, map_tensors
from hwopt.text import listing, nearest

Metrics = dict[str, float]


class BestModel:
    """Keeps the weights, and the plugins' state, of the best evaluation.

    Of equal values the one with the lower loss counts, then the first.
    """

    def __init__(self, run: SavableRun, writer: AsyncWriter, metric: str, greater_is_better: bool) -> None:
        self.run, self.writer, self.metric = run, writer, metric
        self.plugin_state = named_by_class(run.recipe.state)
        self.then: Callable[[], None] = lambda: None  # called once better weights are on disk: the previous ones can be deleted
        self.sign = 1.0 if greater_is_better else -1.0
        self.value: float | None = None
        self.step = 0
        self.evaluated = 0  # the step of the last evaluation
        self.latest: Metrics = {}  # the metrics of the last evaluation
        self.details: dict[str, Any] = {}
        self.metrics: Metrics = {}  # those of the best evaluation

    def state_dict(self) -> dict[str, Any]:
        kept = ("metric", "value", "step", "evaluated", "latest", "details", "metrics")
        return {name: getattr(self, name) for name in kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.evaluated, self.latest = int(state["evaluated"]), dict(state["latest"])
        if state["value"] is None or state["metric"] != self.metric:
            return
        folder = best_folder(self.run.folder, int(state["step"]))
        if wrong := find_corruption(folder) if folder.is_dir() else "there are none":
            self.run.warn(
                f"The best weights so far, of step {state['step']}, cannot be read from {folder} ({wrong}). "
                "Keeping the best of the following evaluations instead"
            )
            if self.run.is_main and folder.is_dir():
                quarantine(folder)
            return
        self.value, self.step = state["value"], int(state["step"])
        self.details, self.metrics = dict(state["details"]), dict(state["metrics"])

    def consider(self, metrics: Metrics, details: dict[str, Any] | None = None) -> bool:
        """Keep the current weights if `metrics` are the best so far; returns whether they are. All ranks call it."""
        self.evaluated, self.latest = self.run.step, metrics
        value = metrics[self.metric]
        better = self.value is None or not math.isfinite(self.value) or self.sign * value > self.sign * self.value
        better = better or (value == self.value and loss_of(metrics) < loss_of(self.metrics))
        if self.value is not None and not (better and math.isfinite(value)):
            return False
        self.writer.wait()
        self.value, self.step, self.details, self.metrics = value, self.run.step, details or {}, metrics
        copies = HostCopies(temporary=self.run.engine.meets_in_micro_batches)
        state: dict[str, Any] = {"engine": {"parameters": self.run.engine.snapshot(copies)}}
        if self.plugin_state:
            own = {name: part.state_dict() for name, part in self.plugin_state.items()}
            state["ranks"] = self.run.engine.all_gather(map_tensors(copies, own))
        weights = self.run.state_dict()
        if self.run.is_main:
            content = {"step": self.step, "metric": self.metric, "value": value if math.isfinite(value) else None}
            self.writer.write(best_folder(self.run.folder, self.step), content, state, weights, copies, then=self.then)
        return True

    def restore(self) -> None:
        """Put the best weights and the plugins' state of that step back, unless they are corrupt. All ranks call it."""
        self.run.accelerator.wait_for_everyone()
        if self.value is not None and self.step != self.run.step:
            folder = best_folder(self.run.folder, self.step)
            wrong = find_corruption(folder) if self.run.is_main else ""
            if self.run.engine.all_reduce_max(int(wrong != "")):
                self.run.warn(f"{folder} is corrupt ({wrong}): final/ gets the weights of the last step instead of the best")
                self.value = None
            else:
                state = load_checkpoint(folder, verify=False).state
                self.run.engine.restore(state["engine"]["parameters"])
                restore_parts(self.plugin_state, state.get("ranks", [{}]), self.run)
        self.run.accelerator.wait_for_everyone()


def loss_of(metrics: Metrics) -> float:
    """The loss of an evaluation, which decides between equal values of its metric."""
    loss = metrics.get("eval_loss")
    return math.inf if loss is None else loss


def best_metric(training: Training, task: Any, prepared: Any, device: Any) -> tuple[str, bool]:
    """(metric, whether greater is better) that decides the best weights: training.metric_for_best_model, or the task's own.

    Raises InputError if there is no such metric, or no evaluation data for it or for early stopping.
    """
    asked = training.metric_for_best_model
    name = f"eval_{(asked or task.default_metric).removeprefix('eval_')}"
    metrics = list(task.metrics(prepared, device).compute())
    known = [f"eval_{part}{metric}" for part in ("", *(f"{name}_" for name in prepared.more_eval)) for metric in metrics]
    if name not in known:
        raise InputError(
            f"training.metric_for_best_model: this task has no metric {asked!r}.{nearest(name, known)} "
            f"Choose one of: {listing(known)}"
        )
    for key in ("metric_for_best_model", "early_stopping_patience"):
        if getattr(training, key) is not None and prepared.eval is None:
            raise InputError(f"training.{key}: needs evaluation data: set data.eval or data.eval_fraction")
    greater = training.greater_is_better
    metric = max((metric for metric in metrics if name.endswith(f"_{metric}")), key=len)
    return name, task.greater_is_better(metric) if greater is None else greater
