"""`hwopt plan`: what `run` would do, and why, without doing it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click

from hwopt.cli.options import begin, format_option, job_options, quiet_transformers
from hwopt.memory.advice.answered_plans import answered, remember
from hwopt.memory.trace.tracing_process import start_early
from hwopt.system.cache import cache_folder

if TYPE_CHECKING:
    from hwopt.planning.inputs import Inputs
    from hwopt.planning.plan import Plan


@click.command(
    help="Show plugin by plugin what `run` would do and why; by default for the profile's card, which need not be installed."
)
@job_options
@click.option(
    "--profile",
    "profiles",
    multiple=True,
    default=("auto",),
    show_default=True,
    help="A profile's name, a TOML file, or auto; repeat it to compare profiles.",
)
@click.option(
    "--hardware",
    type=click.Choice(["profile", "detected"]),
    default="profile",
    show_default=True,
    help="Plan for the card, or this machine.",
)
@click.option("--world-size", type=click.IntRange(min=1), default=1, show_default=True, help="Number of ranks.")
@click.option("--nodes", type=click.IntRange(min=1), help="Number of nodes; shows memory and communication under ZeRO and FSDP.")
@click.option("--measure", is_flag=True, help="Run a step on this device instead of predicting its memory.")
@click.option("--sample", type=click.IntRange(min=1), help="Show this training sample as the model sees it instead.")
@click.option("--values", is_flag=True, help="Also list every value and its source.")
@format_option
def plan(
    job: Path | None,
    profiles: tuple[str, ...],
    assignments: tuple[str, ...],
    memory_limit: str | None,
    strict: bool,
    hardware: str,
    world_size: int,
    nodes: int | None,
    measure: bool,
    sample: int | None,
    values: bool,
    format_: str,
) -> None:
    inputs = begin(profiles, job, assignments, memory_limit)
    if sample is not None:
        return show_sample(sample, profiles[0], job, assignments, inputs, format_)
    options = [hardware, world_size, memory_limit, *assignments]
    question = spelled_out(inputs, profiles, job, assignments, options)
    cache = cache_folder()
    if not answered(cache, question):
        start_early()
    from hwopt import api
    from hwopt.memory.forecast.communication import Ranks
    from hwopt.report.memory import show_side_by_side
    from hwopt.report.planning import PlanScreen, ProgressLine
    from hwopt.report.sharding import show_parallel
    from hwopt.report.terminal import Terminal, show_values

    quiet_transformers()
    ranks = Ranks(world_size, nodes or 1)
    console = Terminal()
    listener = ProgressLine() if format_ == "json" or len(profiles) > 1 else PlanScreen(console)

    def planned(profile: str) -> Plan:
        listener.on_trial(profile)
        return api.plan(
            profile,
            job,
            hardware="detected" if hardware == "detected" else "profile",
            measure=measure,
            gains=len(profiles) == 1,
            listener=listener,
            assignments=assignments,
            strict=strict,
            memory_limit=memory_limit,
            world_size=world_size,
            inputs=inputs,
        )

    try:
        plans = [planned(profile) for profile in profiles]
        parallel = [api.spread_over_ranks(plan, ranks) for plan in plans] if nodes or world_size > 1 else []
    finally:
        listener.clear()
    if all(plan.memory is not None and not plan.memory.lower_bound for plan in plans):
        remember(cache, question)
    if format_ == "json":
        found = [plan.to_dict() for plan in plans]
        for document, comparison in zip(found, parallel, strict=False):
            document["parallel"] = comparison.to_dict()
        click.echo(json.dumps(found[0] if len(found) == 1 else found, indent=2, default=str))
        return
    if len(plans) > 1:
        show_side_by_side(console, plans)
        for plan, comparison in zip(plans, parallel, strict=False):
            show_parallel(console, comparison, f"{plan.profile.name}, ")
        return
    for comparison in parallel:
        show_parallel(console, comparison)
    if values:
        console.print()
        show_values(console, plans[0])


def show_sample(sample: int, profile: str, job: Path | None, assignments: Sequence[str], inputs: Inputs, format_: str) -> None:
    """Show a training sample with the part that counts in the loss marked."""
    from hwopt import api

    quiet_transformers()
    found = api.preview(profile, job, assignments=assignments, sample=sample, inputs=inputs)
    if format_ == "json":
        click.echo(json.dumps(asdict(found), indent=2, ensure_ascii=False))
        return
    from hwopt.report.preview import show_preview
    from hwopt.report.terminal import Terminal

    show_preview(Terminal(), found)


def spelled_out(
    inputs: Inputs, profiles: Sequence[str], job: Path | None, assignments: Sequence[str], options: Sequence[Any]
) -> str:
    """Return everything that the command was given, as text: the job, the profiles and the options."""
    given = inputs.job(job, assignments)
    contents = [name if name == "auto" else inputs.profile(name, assignments).content.model_dump_json() for name in profiles]
    return json.dumps([None if given is None else given.job.model_dump_json(), contents, *map(str, options)])
