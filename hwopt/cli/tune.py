"""`hwopt tune`: the fastest setting of a profile for a job on this machine, measured."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click

from hwopt.cli.options import begin, format_option, job_options, profile_option, quiet_transformers

if TYPE_CHECKING:
    from hwopt.planning.plan import Plan


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
    job: Path | None,
    profile: str,
    assignments: tuple[str, ...],
    memory_limit: str | None,
    strict: bool,
    output: Path | None,
    force: bool,
    trials: int,
    steps: int,
    time_limit: float,
    format_: str,
) -> int:
    inputs = begin([profile], job, assignments, memory_limit)
    from hwopt.errors import InputError
    from hwopt.planning.inputs import refuse_missing_data
    from hwopt.system.ranks import rank_and_world
    from hwopt.trials.tuned_profile import Parent, output_file

    if rank_and_world(os.environ)[1] > 1:
        raise InputError("hwopt tune measures one process. Start it without a launcher")
    refuse_missing_data(inputs.job(job, assignments))
    if profile != "auto":  # before the slow part
        output_file(output, Parent.of(profile, inputs.profile(profile), inputs.files), job, force)
    from hwopt import api
    from hwopt.report.terminal import Terminal
    from hwopt.report.tune import TuneProgress, TuneScreen
    from hwopt.system import signals
    from hwopt.trials.space import Space
    from hwopt.trials.trial import Variant
    from hwopt.trials.tuned_profile import job_assignments
    from hwopt.trials.tuning import TuneEffort, Tuning

    quiet_transformers()

    def resolved(changes: Sequence[str] = ()) -> Plan:
        return api.resolve(
            profile, job, assignments=[*assignments, *changes], strict=strict, memory_limit=memory_limit, inputs=inputs
        )

    screen = TuneScreen(Terminal())
    progress = TuneProgress() if format_ == "json" else screen
    start = resolved()
    parent = Parent.of(profile, start.profile, inputs.files)
    path = output_file(output, parent, job, force)
    space = Space(start, inputs.registry, resolved, api.cache_folder(), progress.on_planning)
    signals.install_handlers()
    with Tuning(
        space, job, Variant("start", profile, assignments, memory_limit), TuneEffort(trials, steps, time_limit), progress
    ) as tuning:
        code = tuning.run()
        if tuning.improved:
            tuning.write(path, parent, assignments, force)
            given = job_assignments(assignments)
            tuning.check(api.resolve(str(path), job, assignments=given, memory_limit=memory_limit))
        result = tuning.result()
    if format_ == "json":
        click.echo(json.dumps(result.to_dict(), indent=2))
    else:
        screen.show_result(result)
    return code
