"""`hwopt run`: from a card's profile to a trained model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click

from hwopt.cli.options import job_options, profile_option, quiet_libraries, quiet_transformers

if TYPE_CHECKING:
    from hwopt.plan import Plan


@click.command(help="Train JOB (default: ./job.toml, else the embedded demo) with the optimizations of a card's profile.")
@job_options
@profile_option
@click.option("--name", help="The run's folder under --output-dir; default: from job and profile.")
@click.option("--output-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True, help="Where runs go.")
@click.option(
    "--processes", metavar="N|auto", help="Ranks on this machine, one a CUDA device (auto: all of them); default: this process."
)
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
) -> int:
    quiet_libraries()
    if processes is not None:
        from hwopt.processes import ranks_to_start, run_ranks

        if (number := ranks_to_start(processes, os.environ)) > 1:
            ending = run_ranks(number, typed)
            if ending.message:
                click.echo(ending.message, err=True)
            return ending.exit_code
    from hwopt import api, signals
    from hwopt.launcher import rank_and_world
    from hwopt.report.memory import show_forecast
    from hwopt.report.screen import Screen, Terminal, show_plan

    quiet_transformers()
    rank, world_size = rank_and_world(os.environ)
    if name is not None:
        api.run_folder(output_dir, name, "")  # a bad name is said before the work, not after

    def resolved(changes: Sequence[str] = ()) -> Plan:
        return api.resolve(
            profile,
            job,
            assignments=[*assignments, *changes],
            strict=strict,
            memory_limit=memory_limit,
            world_size=world_size,
        )

    plan = resolved()
    stem = "job" if job is None else job.stem
    default = f"{'demo' if plan.is_demo else stem}-{plan.profile.name}"
    folder = api.run_folder(output_dir, name, default)
    console = Terminal()
    if rank == 0:
        if plan.hardware.device_type == "cuda":
            plan = api.with_memory(plan, resolved)
        show_plan(console, plan)
        show_forecast(console, plan)
    screen = Screen(console)
    signals.listen()
    try:
        api.execute(plan, folder, screen, replan=resolved)
    finally:
        screen.close()
    return 0
