"""Create the task of a job."""

from __future__ import annotations

from hwopt.config.job import Job
from hwopt.tasks.base import Task


def make_task(job: Job) -> Task:
    """The task that the job's task.kind names."""
    from hwopt.tasks.causal_lm import CausalLM
    from hwopt.tasks.text_classification import TextClassification

    tasks: dict[str, type[Task]] = {task.kind: task for task in (TextClassification, CausalLM)}
    return tasks[job.task.kind](job.task)
