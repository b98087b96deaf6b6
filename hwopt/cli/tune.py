"""`hwopt tune`: the fastest setting of a profile for a job on this machine, measured."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import rich_click as click

from hwopt.cli.options import begin, format_option, job_options, profile_option, say_json
from hwopt.errors import InputError
from hwopt.report.status_line import status_line


@click.command(
    help="Measure micro-batch, data workers, prefetch, checkpointing, compilation and attention kernels of a profile in short "
    "trials, and write a profile with the fastest. The training stays the same, with the same rows per optimizer step."
)
@job_options
@profile_option
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The profile to write; default: PROFILE_tuned.toml beside the job.",
)
@click.option("--force", is_flag=True, help="Overwrite the file of -o.")
@click.option("--trials", type=click.IntRange(min=2), default=12, show_default=True, help="The most trials.")
@click.option("--steps", type=click.IntRange(min=8), default=40, show_default=True, help="Optimizer steps of a trial.")
@click.option(
    "--time-limit", type=click.FloatRange(min=1), default=600, show_default=True, metavar="SECONDS", help="The most of a trial."
)
@format_option
def tune(
    profile: str, output: Path | None, force: bool, trials: int, steps: int, time_limit: float, format_: str, **asked: Any
) -> int:
    inputs = begin([profile], **asked)
    from hwopt.planning.inputs import refuse_missing_data
    from hwopt.system.ranks import rank_and_world

    if rank_and_world(os.environ)[1] > 1:
        raise InputError("hwopt tune measures one process. Start it without a launcher")
    refuse_missing_data(inputs.job(asked["job"], asked["assignments"]))
    from hwopt.report.terminal import Terminal
    from hwopt.report.tune import show_result, show_trial
    from hwopt.system import signals
    from hwopt.trials.tuning import TrialRow, TuneEffort, tuned

    signals.install_handlers()
    console, as_json = Terminal(), format_ == "json"

    def on_trial(row: TrialRow) -> None:
        if not as_json:
            show_trial(console, row)

    effort = TuneEffort(trials, steps, time_limit)
    result, code = tuned(profile, inputs, effort, status_line, on_trial, output, force, **asked)
    if as_json:
        say_json(result.to_dict())
    else:
        show_result(console, result)
    return code
