"""`hwopt.optimized` and `hwopt.train`: those of `hwopt.hosts` and `hwopt.api`, with report.html."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hwopt import api
from hwopt.hosts import own_training, trainer
from hwopt.hosts.script_run import with_lines
from hwopt.report.run_files import ReportFile, with_run_files
from hwopt.runs.journal import ScriptJournal
from hwopt.training.listener import Listener, Summary


def optimized(trainer_class: type, profile: str = "auto", *, listener: Listener | None = None, **settings: Any) -> Any:
    """`hwopt.hosts.trainer.optimized`, with lines on the terminal, and plan, evidence and report.html in `output_dir`."""
    listeners = with_lines(listener, ScriptJournal(), ReportFile())
    return trainer.optimized(trainer_class, profile, listener=listeners, **settings)


def train(job: Path | str | None = None, profile: str = "auto", *, listener: Listener | None = None, **given: Any) -> Summary:
    """`api.train` of a job; with `model=`, `own_training.train_own`, whose first argument is the profile.

    Both write run.log and report.html in the run folder, as `hwopt run` does.
    """
    if "model" not in given:
        return api.train(job, profile, listener=with_run_files(*([listener] if listener else [])), **given)
    files = with_run_files(with_lines(listener))
    return own_training.train_own(str(job) if job is not None else profile, listener=files, **given)
