"""`hwopt bench`: the before/after table of a profile, measured on this machine."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click

from hwopt.cli.options import begin, format_option, profile_option, quiet_transformers, say, source_options
from hwopt.errors import StorageError
from hwopt.text import printable

if TYPE_CHECKING:
    from hwopt.planning.inputs import Inputs
    from hwopt.trials.benchmark import Effort
    from hwopt.trials.progress import ProgressLine


@click.command(
    help="Measure on this machine what a profile gains: the baseline, the profile, and each plugin added to the one and left "
    "out of the other, in short trainings of JOB (default: ./job.toml, else the embedded demo). Ctrl-C shows the table so far."
)
@source_options
@profile_option
@click.option(
    "--against",
    metavar="PROFILE|none",
    help="The baseline; none: no plugins, fp32. Default: the profile's _before if there is one, else none.",
)
@click.option("--rounds", type=click.IntRange(min=3), default=5, show_default=True, help="Measurements of each variant, at most.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0.1),
    default=3.0,
    show_default=True,
    help="Training of the baseline in each; other variants train as many rows.",
)
@click.option(
    "--steps", type=click.IntRange(min=12), help="Optimizer steps in each, instead of --seconds. With --claims: 40 by default."
)
@click.option(
    "--time-limit", type=click.FloatRange(min=1), default=600.0, show_default=True, help="Seconds after which one is killed."
)
@click.option("--memory-limit", metavar="SIZE", help="Run as if the device had only this much memory, such as 8GiB.")
@click.option("--claims", is_flag=True, help="Instead: check the claims of the profile, by measuring where this machine can.")
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
    claims: bool,
    output: Path | None,
    format_: str,
) -> int:
    if claims and (job is not None or assignments or against is not None or memory_limit is not None or output is not None):
        raise click.UsageError("--claims takes the model of the profile: omit JOB, --set, --against, --memory-limit and -o.")
    if output is not None:
        refuse_unwritable(output)
    inputs = begin([profile], job, assignments, memory_limit)
    from hwopt.report.bench import show_bench
    from hwopt.report.terminal import Terminal
    from hwopt.system import signals
    from hwopt.trials.benchmark import Effort
    from hwopt.trials.preparation import prepare, run_bench
    from hwopt.trials.progress import ProgressLine
    from hwopt.trials.trial import Variant

    quiet_transformers()
    signals.install_handlers()
    progress, effort = ProgressLine(), Effort(rounds, seconds, steps, time_limit)
    if claims:
        check_claims(inputs, profile, effort, progress, format_)
        return 0
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


def check_claims(inputs: Inputs, profile: str, effort: Effort, progress: ProgressLine, format_: str) -> None:
    """Print the verdicts on the claims of `profile`, as `hwopt claims` does; after Ctrl-C those that were measured until then."""
    from hwopt.report.claims import as_dict, show_findings
    from hwopt.report.terminal import Terminal
    from hwopt.trials.claims import check

    try:
        findings, ended = check(inputs, profile, effort, progress)
    finally:
        progress.clear()
    if format_ == "json":
        click.echo(json.dumps([as_dict(finding) for finding in findings], indent=2))
    else:
        show_findings(Terminal(), findings)
    if ended is not None:
        raise ended


def refuse_unwritable(output: Path) -> None:
    """Raise StorageError, before anything is measured, if `output` cannot be created."""
    folder = output.absolute().parent
    if not folder.is_dir() or not os.access(output if output.exists() else folder, os.W_OK):
        raise StorageError(f"-o {printable(str(output))}: cannot be written. Give a file in an existing folder")
