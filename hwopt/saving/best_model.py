"""The best weights so far, by one metric: a model of their own in the run folder, `best-<step>/`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hwopt.errors import InputError
from hwopt.saving.reader import best_folder, load_checkpoint, quarantine
from hwopt.saving.tensor_tree import HostCopies
from hwopt.system.atomic_folder import find_corruption
from hwopt.text import listing, nearest

if TYPE_CHECKING:
    from hwopt.saving.async_writer import Writer
    from hwopt.saving.savable_run import SavableRun


class BestWeights:
    """Keeps what `metric` calls the best; the later one of equals loses. A part of every checkpoint."""

    def __init__(self, run: SavableRun, writer: Writer, metric: str, greater_is_better: bool) -> None:
        self.run, self.writer, self.metric = run, writer, metric
        self.then: Callable[[], None] = lambda: None
        """What follows once better ones are on the disk: those before may go."""
        self.sign = 1.0 if greater_is_better else -1.0
        self.value: float | None = None
        self.step = 0
        self.evaluated = 0
        """The step of the last evaluation, and what it found."""
        self.latest: dict[str, float] = {}

    def state_dict(self) -> dict[str, Any]:
        own = {"metric": self.metric, "value": self.value, "step": self.step}
        return own | {"evaluated": self.evaluated, "latest": self.latest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.evaluated, self.latest = int(state["evaluated"]), dict(state["latest"])
        if state["value"] is None or state["metric"] != self.metric:
            return
        folder = best_folder(self.run.folder, int(state["step"]))
        if wrong := find_corruption(folder) if folder.is_dir() else "there are none":
            self.run.warn(
                f"the best weights so far, of step {state['step']}, cannot be taken from {folder} ({wrong}): "
                "from here on the best of what comes is kept"
            )
            if self.run.is_main and folder.is_dir():
                quarantine(folder)
            return
        self.value, self.step = state["value"], int(state["step"])

    def consider(self, metrics: dict[str, float]) -> bool:
        """Keep the current weights if `metrics` are the best so far. All ranks call it."""
        self.evaluated, self.latest = self.run.step, metrics
        value = metrics[self.metric]
        better = self.value is None or not math.isfinite(self.value) or self.sign * value > self.sign * self.value
        if self.value is not None and not (better and math.isfinite(value)):
            return False
        self.writer.wait()
        self.value, self.step = value, self.run.step
        kept = HostCopies(passing=self.run.engine.meets_in_micro_batches)
        state = {"engine": {"parameters": self.run.engine.snapshot(kept)}}
        weights = self.run.state_dict()
        if self.run.is_main:
            content = {"step": self.step, "metric": self.metric, "value": value if math.isfinite(value) else None}
            self.writer.begin(best_folder(self.run.folder, self.step), content, state, weights, kept, then=self.then)
        return True

    def restore(self) -> None:
        """Put the best weights back into the model, unless they are the current ones. All ranks call it.

        Where they are not whole any more the current ones stay, and nothing is called the best.
        """
        self.run.accelerator.wait_for_everyone()
        if self.value is not None and self.step != self.run.step:
            folder = best_folder(self.run.folder, self.step)
            wrong = find_corruption(folder) if self.run.is_main else ""
            if self.run.engine.all_reduce_max(int(wrong != "")):
                self.run.warn(f"the best weights, {folder}, are not whole ({wrong}): final/ gets those of the last step")
                self.value = None
            else:
                self.run.engine.restore(load_checkpoint(folder, verify=False).state["engine"]["parameters"])
        self.run.accelerator.wait_for_everyone()


def best_metric(run: SavableRun) -> tuple[str, bool]:
    """What `training.metric_for_best_model` names, or the task's own metric, and whether a greater one is better.

    Raises InputError where there is no such metric.
    """
    asked = run.training.metric_for_best_model
    name = f"eval_{(asked or run.task.default_metric).removeprefix('eval_')}"
    known = [f"eval_{metric}" for metric in run.task.metrics(run.prepared, run.device).compute()]
    if name not in known:
        raise InputError(
            f"training.metric_for_best_model: there is no metric {asked!r} here.{nearest(name, known)} "
            f"It is one of: {listing(known)}"
        )
    if asked and run.prepared.eval is None:
        raise InputError("training.metric_for_best_model needs data.eval or data.eval_fraction")
    greater = run.training.greater_is_better
    return name, run.task.greater_is_better(name) if greater is None else greater
