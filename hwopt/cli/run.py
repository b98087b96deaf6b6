"""`hwopt run`: from a card's profile to a trained model."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click

from hwopt.cli.options import begin, job_options, profile_option, quiet_transformers, say

if TYPE_CHECKING:
    from hwopt.planning.plan import Plan


@click.command(help="Train JOB (default: ./job.toml, else the embedded demo) with the optimizations of a card's profile.")
@job_options
@profile_option
@click.option("--name", help="The run's folder under --output-dir; default: from job and profile.")
@click.option("--output-dir", type=Path, default=Path("runs"), show_default=True, help="Where runs go.")
@click.option(
    "--processes", metavar="N|auto", help="Ranks on this machine, one a CUDA device (auto: all of them); default: this process."
)
@click.option("--resume", is_flag=True, help="Resume from the newest valid checkpoint of the run folder, if there is one.")
@click.option(
    "--resume-from",
    type=click.Path(path_type=Path),
    metavar="CHECKPOINT",
    help="Resume from this checkpoint in a new folder.",
)
@click.option("--fresh", is_flag=True, help="Start again in an existing run folder; the old run is kept beside it.")
@click.option("--report-to", metavar="NAMES", default="", help="Trackers, separated by commas: tensorboard, wandb, mlflow, …")
@click.option("-v", "--verbose", is_flag=True, help="Show the options and the evidence of every plugin.")
@click.pass_obj
def run(
    typed: list[str],
    job: Path | None,
    profile: str,
    assignments: tuple[str, ...],
    memory_limit: str | None,
    strict: bool,
    name: str | None,
    output_dir: Path,
    processes: str | None,
    resume: bool,
    resume_from: Path | None,
    fresh: bool,
    report_to: str,
    verbose: bool,
) -> int:
    if sum((resume, resume_from is not None, fresh)) > 1:
        raise click.UsageError("--resume, --resume-from and --fresh exclude each other; give one of them.")
    inputs = begin([profile], job, assignments, memory_limit)
    from hwopt.planning.inputs import refuse_missing_data
    from hwopt.runs.folder import run_folder
    from hwopt.runs.launch import ranks_to_start, run_ranks
    from hwopt.saving.reader import checkpoint_in
    from hwopt.system.ranks import rank_and_world, refuse_missing_rendezvous

    # report an invalid or existing folder, and missing data, before the slow part
    run_folder(output_dir, name, "", resume=resume or resume_from is not None, fresh=fresh)
    if resume_from is not None:
        resume_from = checkpoint_in(resume_from)
    ranks = 1 if processes is None else ranks_to_start(processes, os.environ)
    refuse_missing_rendezvous(os.environ)
    rank, world_size = rank_and_world(os.environ)
    refuse_missing_data(inputs.job(job, assignments))
    if ranks > 1:
        ending = run_ranks(ranks, typed)
        if ending.message:
            say(ending.message, err=True)
        return ending.exit_code
    from hwopt import api
    from hwopt.interop.launcher_environment import missing_ranks, parent_command
    from hwopt.report.memory import show_forecast, show_gains
    from hwopt.report.planning import ProgressLine
    from hwopt.report.screen import Screen
    from hwopt.report.terminal import Terminal, show_plan
    from hwopt.report.trackers import listeners_for
    from hwopt.system import signals
    from hwopt.training.listener import Listeners

    quiet_transformers()
    trackers = listeners_for([name.strip() for name in report_to.split(",") if name.strip()])
    before: Mapping[str, Any] = {}

    def resolved(changes: Sequence[str] = ()) -> Plan:
        return api.resolve(
            profile,
            job,
            assignments=[*assignments, *changes],
            strict=strict,
            memory_limit=memory_limit,
            world_size=world_size,
            before=before,
            inputs=inputs,
        )

    if resume_from is not None:
        before = api.checkpoint_says(resume_from)
    elif resume and name is not None:
        before = api.checkpoint_says(output_dir / name)
    plan = resolved()
    stem = "job" if job is None else job.stem
    default = f"{'demo' if plan.is_demo else stem}-{plan.profile.name}"
    next_folder = None
    if resume_from is None:
        if name is None and not (resume or fresh):
            next_folder = partial(api.run_folder, output_dir, None, default)
        folder = api.run_folder(output_dir, name, default, resume=resume, fresh=fresh)
    else:
        folder = api.folder_for_resume(resume_from, output_dir, name, default)
    if resume and name is None and plan.chose:
        before = api.checkpoint_says(folder)
        plan = resolved()
    if note := missing_ranks(os.environ, parent_command()):
        plan = replace(plan, notes=(*plan.notes, note))
    console = Terminal()
    if rank == 0:
        if plan.hardware.device_type == "cuda":
            plan = api.with_memory(plan, resolved, listener=ProgressLine())
        show_plan(console, plan, verbose)
        show_forecast(console, plan)
    screen = Screen(console, verbose)
    signals.install_handlers()
    try:
        api.execute(
            plan,
            folder,
            Listeners(screen, *trackers),
            replan=resolved,
            resume=resume_from or resume,
            fresh=fresh,
            next_folder=next_folder,
        )
    finally:
        screen.close()
    if rank == 0 and plan.memory is not None:  # after the training, because the search takes seconds
        show_gains(console, api.with_gains(plan, resolved))
    return 0
