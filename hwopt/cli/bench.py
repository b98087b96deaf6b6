"""`hwopt bench`: the before/after table of a profile, measured on this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import rich_click as click

from hwopt.cli.options import begin, format_option, profile_option, read_files, say, say_result, source_options
from hwopt.report.status_line import status_line
from hwopt.system.paths import OR_FORCE, refuse_output, write_text


@click.command(
    help="Measure on this machine what a profile gains: the baseline, the profile, and each plugin added to the one and left "
    "out of the other, in short trainings of JOB (default: ./job.toml, else the embedded demo). Ctrl-C shows the table so far."
)
@source_options
@profile_option
@click.option("--against", metavar="PROFILE|none", help="The baseline; none: no plugins, fp32. Default: none.")
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
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Also write an HTML page.")
@click.option("--force", is_flag=True, help="Overwrite the file of -o.")
@format_option
def bench(
    profile: str,
    against: str | None,
    rounds: int,
    seconds: float,
    steps: int | None,
    time_limit: float,
    output: Path | None,
    force: bool,
    format_: str,
    **asked: Any,
) -> int:
    if output is not None:
        refuse_output(output, "-o", "" if force else OR_FORCE, read_files(asked["job"], profile, against))
    inputs = begin([profile], **asked)
    from hwopt.report.bench import bench_page, show_bench
    from hwopt.runs.journal import command_line
    from hwopt.system import signals
    from hwopt.trials.bench import run_bench
    from hwopt.trials.benchmark import BenchEffort
    from hwopt.trials.trial import Variant

    signals.install_handlers()
    subject = Variant("profile", profile, asked["assignments"], asked["memory_limit"])
    effort = BenchEffort(rounds, seconds, steps, time_limit)
    found, ended = run_bench(inputs, asked["job"], subject, against, effort, status_line)
    if output is not None:
        write_text(output, bench_page(found, command_line(sys.orig_argv)))
    say_result(format_, found.to_dict(), lambda console: show_bench(console, found))
    if output is not None:
        say(f"The page of the bench is {output}", err=True)
    if ended is not None:
        raise ended
    return 0
