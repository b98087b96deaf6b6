"""Create the task of a job."""

from __future__ import annotations

from hwopt.config.job import Job
from hwopt.config.task_kinds import task_class
from hwopt.errors import PluginError
from hwopt.tasks.base import Task
from hwopt.text import truncate


def make_task(job: Job) -> Task:
    """The task that the job's task.kind names. Raises PluginError if its class breaks the contract."""
    found = task_class(job.task.kind)
    check_contract(found)
    task: Task = found(job.task)
    return task


def check_contract(found: type) -> None:
    """Raise PluginError if `found` is not a complete task; the message has the first fault."""
    who = f"task {truncate(found)}"
    if not issubclass(found, Task):
        raise PluginError(f"{who}: expected a subclass of hwopt.tasks.base.Task")
    for name in ("samples", "store", "loss", "metrics", "read_inputs", "predictor"):
        if getattr(found, name) is getattr(Task, name):
            raise PluginError(f"{who}: does not define {name}()")
    for name in ("default_metric", "metric_directions", "pipeline_tag"):
        if not hasattr(found, name):
            raise PluginError(f"{who}: does not define `{name}`")
    if found.default_metric.removeprefix("eval_") not in found.metric_directions:
        raise PluginError(f"{who}: `metric_directions` lacks the default metric {found.default_metric!r}")
