"""The program of a trial: plans the variant, builds its run, and trains a few steps without evaluations, saves and `final/`."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwopt.errors import HwoptError, exit_code_of
from hwopt.records.run_files import read_object
from hwopt.runs.folder import write_status
from hwopt.system import fork_server
from hwopt.system.atomic_folder import write_json
from hwopt.system.fork_server import end_with, import_modules
from hwopt.trials.trial import OUTPUT, REQUEST, RESULT

if TYPE_CHECKING:
    from hwopt.training.run import Run

OWN = ("training.logging_steps=1", "training.save_minutes=0", "training.save_steps=1000000000")
"""Assignments of every trial: a log row for each step, no checkpoint."""
LIBRARIES = ("torch", "transformers.modeling_utils", "transformers.initialization", "accelerate", "hwopt.memory.planned")


def main(folder: str, parent: str) -> None:
    """The program of a new interpreter: run the trial of `folder`, and end with its exit code, or with the process `parent`."""
    end_with(int(parent))
    sys.exit(run(Path(folder)))


def serve(descriptor: int, parent: int) -> None:
    """The program of a fork server: import the libraries; then run a trial in a fork for each folder that it is asked for."""
    fork_server.serve(descriptor, parent, lambda _: import_modules(LIBRARIES), run_forked)


def run_forked(folder: bytes) -> bytes:
    """Run the trial of `folder` in this fork; returns its exit code."""
    path = Path(folder.decode())
    output = os.open(path / OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    return str(run(path)).encode()


def run(folder: Path) -> int:
    """Run the trial of `folder`; returns its exit code. status.json says why it failed."""
    warnings.simplefilter("ignore")
    try:
        train_variant(folder, read_object(folder / REQUEST))
    except BaseException as error:
        code = exit_code_of(error) or 1
        message = str(error) if isinstance(error, HwoptError) else f"{type(error).__name__}: {error}"
        write_status(folder, code, message)
        traceback.print_exc()
        return code
    write_status(folder, 0, "done")
    return 0


def train_variant(folder: Path, request: dict[str, Any]) -> None:
    """Plan the variant of `request` as `hwopt run` does, and train its steps."""
    from hwopt.export.accelerate import exports_of, refuse_contradictions
    from hwopt.memory.planned import resolve
    from hwopt.model.remote_code import trust_only
    from hwopt.runs.journal import Journal
    from hwopt.system.cache import cache_folder
    from hwopt.training.build import build
    from hwopt.training.failure import report_oom

    trust_only(request["trusted"])
    plan = resolve(
        request["profile"],
        request["job"],
        assignments=[*request["assignments"], *OWN, f"training.max_steps={request['steps']}"],
        memory_limit=request["memory_limit"],
    )
    refuse_contradictions(os.environ, plan.recipe.accelerator, plan.hardware, exports_of(plan))
    with report_oom("the model", plan.batch_option("train")), build(plan, folder, cache_folder(), listener=Journal()) as run:
        if request["without_dropout"]:
            turn_off_dropout(run.inner_model)
        reduced_rows = train_steps(run)
        write_json(folder / RESULT, {"reduced_rows": reduced_rows})


def train_steps(run: Run) -> int | None:
    """Train every step of `run`. Returns the rows of its micro-batches if those of the plan did not fit.

    The largest evaluation batch is tried for its memory; nothing is evaluated or saved.
    """
    from hwopt.saving.writer import AsyncWriter
    from hwopt.training.accumulation import preflight
    from hwopt.training.failure import report_oom
    from hwopt.training.loop import Loop, summarize

    writer = AsyncWriter(run)
    try:
        with report_oom("training", run.plan.batch_option("train")):
            loop = Loop(run, writer)
            with run.engine.synchronized(loop.backoff):
                run.engine.init_state()
            run.listener.on_start(run)
            preflight(run, loop.accumulation, loop.evaluation)
            run.eval_loader = None  # no evaluation is due without it
            with loop.use.running():
                loop.steps()
            loop.report(loop.telemetry.flush())
        run.listener.on_finish(run, summarize(run, loop.telemetry, loop.use, loop.telemetry.seconds, loop.best))
        return max(1, run.batch.train >> loop.backoff.rung) if loop.backoff.oom_count else None
    finally:
        writer.close()


def turn_off_dropout(model: Any) -> None:
    """Set every probability of dropout in the modules of `model` to 0."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and (name == "p" or "drop" in name):
                setattr(module, name, 0.0)
