"""`hwopt bench`: the before/after table of a profile, measured on this machine."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import rich_click as click

from hwopt.cli.options import begin, format_option, profile_option, quiet_transformers, say, source_options
from hwopt.errors import StorageError
from hwopt.text import printable


@click.command(
    help="Measure on this machine what a profile gains: the baseline, the profile, and each plugin added to the one and left "
    "out of the other, in short trainings of JOB (default: ./job.toml, else the embedded demo). Ctrl-C shows the table so far."
)
@source_options
@profile_option
@click.option(
    "--against",
    metavar="PROFILE|none",
    help="The baseline; none: no plugins, fp32. Default: none.",
)
@click.option("--rounds", type=click.IntRange(min=3), default=5, show_default=True, help="Measurements of each variant, at most.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0.1),
    default=3.0,
    show_default=True,
    help="Training of the baseline in each; other variants train as many rows.",
)
@click.option("--steps", type=click.IntRange(min=12), help="Optimizer steps in each, instead of --seconds.")
@click.option(
    "--time-limit", type=click.FloatRange(min=1), default=600.0, show_default=True, help="Seconds after which one is killed."
)
@click.option("--memory-limit", metavar="SIZE", help="Run as if the device had only this much memory, such as 8GiB.")
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Also write an HTML page.")
@format_option
def bench(
    job: Path | None,
    assignments: tuple[str, ...],
    profile: str,
    against: str | None,
    rounds: int,
    seconds: float,
    steps: int | None,
    time_limit: float,
    memory_limit: str | None,
    output: Path | None,
    format_: str,
) -> int:
    if output is not None:
        refuse_unwritable(output)
    inputs = begin([profile], job, assignments, memory_limit)
    from hwopt.report.bench import show_bench
    from hwopt.report.bench_progress import ProgressLine
    from hwopt.report.terminal import Terminal
    from hwopt.system import signals
    from hwopt.trials.benchmark import BenchEffort
    from hwopt.trials.preparation import prepare, run_bench
    from hwopt.trials.trial import Variant

    quiet_transformers()
    signals.install_handlers()
    progress, effort = ProgressLine(), BenchEffort(rounds, seconds, steps, time_limit)
    prepared = prepare(inputs, job, Variant("profile", profile, assignments, memory_limit), against, progress.on_plan)
    found, ended = run_bench(prepared, effort, progress)
    progress.clear()
    if output is not None:
        from hwopt.report.bench_page import write_bench_page
        from hwopt.runs.processes import command_line

        write_bench_page(found, output, command_line(sys.orig_argv))
    if format_ == "json":
        click.echo(json.dumps(found.to_dict(), indent=2))
    else:
        show_bench(Terminal(), found)
        if output is not None:
            say(f"The page of the bench is {output}")
    if ended is not None:
        raise ended
    return 0


def refuse_unwritable(output: Path) -> None:
    """Raise StorageError, before anything is measured, if `output` cannot be created."""
    folder = output.absolute().parent
    if not folder.is_dir() or not os.access(output if output.exists() else folder, os.W_OK):
        raise StorageError(f"-o {printable(str(output))}: cannot be written. Give a file in an existing folder")
