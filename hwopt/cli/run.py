"""`hwopt run`: from a card's profile to a trained model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import rich_click as click

from hwopt.cli.options import begin, job_options, profile_option, say


@click.command(help="Train JOB (default: ./job.toml, else the embedded demo) with the optimizations of a card's profile.")
@job_options
@profile_option
@click.option("--name", help="The run's folder under --output-dir; default: from job and profile.")
@click.option("--output-dir", type=Path, default=Path("runs"), show_default=True, help="Where runs go.")
@click.option(
    "--processes",
    metavar="N|auto",
    help="Processes on this machine, one a CUDA device (auto: all of them); default: this process.",
)
@click.option("--resume", is_flag=True, help="Resume from the newest valid checkpoint of the run folder, if there is one.")
@click.option(
    "--resume-from", type=click.Path(path_type=Path), metavar="CHECKPOINT", help="Resume from this checkpoint in a new folder."
)
@click.option("--fresh", is_flag=True, help="Start again in an existing run folder; the old run is kept beside it.")
@click.option("--report-to", metavar="NAMES", default="", help="Trackers, separated by commas: tensorboard, wandb, mlflow, …")
@click.option("-v", "--verbose", is_flag=True, help="Show the options and the evidence of every plugin.")
@click.pass_obj
def run(
    typed: list[str],
    /,
    profile: str,
    name: str | None,
    output_dir: Path,
    processes: str | None,
    resume: bool,
    resume_from: Path | None,
    fresh: bool,
    report_to: str,
    verbose: bool,
    **asked: Any,
) -> int:
    if sum((resume, resume_from is not None, fresh)) > 1:
        raise click.UsageError("--resume, --resume-from and --fresh exclude each other; give one of them.")
    inputs = begin([profile], **asked)
    from hwopt.planning.inputs import refuse_missing_data
    from hwopt.runs.folder import Target
    from hwopt.runs.launch import ranks_to_start, run_ranks
    from hwopt.system.ranks import refuse_missing_rendezvous

    # mistakes that need no torch, which takes seconds to import
    target = Target(output_dir, name, resume_from or resume, fresh)
    target.require_usable()
    ranks = 1 if processes is None else ranks_to_start(processes, os.environ)
    refuse_missing_rendezvous(os.environ)
    refuse_missing_data(inputs.job(asked["job"], asked["assignments"]))
    if ranks > 1:
        ending = run_ranks(ranks, typed)
        if ending.message:
            say(ending.message, err=True)
        return ending.exit_code
    from hwopt import api
    from hwopt.report.memory import RunScreen
    from hwopt.report.run_files import with_run_files
    from hwopt.report.screen import Screen
    from hwopt.report.terminal import Terminal
    from hwopt.report.trackers import listeners_for
    from hwopt.system import signals

    trackers = listeners_for([name.strip() for name in report_to.split(",") if name.strip()])
    console = Terminal()
    screen = Screen(console, verbose)
    signals.install_handlers()
    listener, plan_listener = with_run_files(screen, *trackers), RunScreen(console, verbose)
    try:
        api.train(profile=profile, target=target, listener=listener, plan_listener=plan_listener, inputs=inputs, **asked)
    finally:
        screen.close()
    return 0
