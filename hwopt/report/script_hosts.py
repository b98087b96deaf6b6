"""The hosts of `hwopt.hosts` with a listener that prints: what a script of the user's calls as `hwopt.optimized` and so on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hwopt import api
from hwopt.hosts import accelerate, own_training, torch, trainer
from hwopt.hosts.apply import Applied
from hwopt.hosts.apply import apply as apply_plugins
from hwopt.report.run_files import ReportFile, with_run_files
from hwopt.runs.journal import ScriptJournal
from hwopt.text import printable
from hwopt.training.listener import Listener, Listeners, Summary


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


def session(profile: str, model: Any, *, listener: Listener | None = None, **settings: Any) -> torch.Session:
    """`hwopt.hosts.torch.session`, with lines on the terminal."""
    return torch.session(profile, model, listener=with_lines(listener), **settings)


def apply(model: Any, plugins: Any, profile: str = "auto", *, listener: Listener | None = None, **settings: Any) -> Applied:
    """`hwopt.hosts.apply.apply`, with lines on the terminal."""
    return apply_plugins(model, plugins, profile, listener=with_lines(listener), **settings)


class Accelerator(accelerate.Accelerator):
    """`hwopt.hosts.accelerate.Accelerator`, with lines on the terminal."""

    def __init__(self, *positional: Any, listener: Listener | None = None, **named: Any) -> None:
        super().__init__(*positional, listener=with_lines(listener), **named)


class Lines(Listener):
    """Prints what the plan says and what evidence finds, as lines between those of the script."""

    def on_message(self, run: Any, message: str) -> None:
        print(f"hwopt: {printable(message)}", flush=True)

    def on_warning(self, run: Any, message: str) -> None:
        self.on_message(run, f"WARNING: {message}")

    def on_evidence(self, run: Any, found: list[Any]) -> None:
        for decision, evidence in found:
            self.on_message(run, f"after step {run.step}: {evidence.status:8} {decision.name}: {evidence.seen}")

    on_final_evidence = on_evidence


def with_lines(listener: Listener | None, *files: Listener) -> Listeners:
    """`listener`, lines on the terminal, and `files`."""
    return Listeners(*([listener] if listener else []), Lines(), *files)
