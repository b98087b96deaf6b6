"""`hwopt plan`: what `run` would do, and why, without doing it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click

from hwopt.cli.options import begin, format_option, hardware_option, job_options, say_json, say_result, world_size_option
from hwopt.memory.trace.tracing_process import start_early
from hwopt.text import counted, printable

if TYPE_CHECKING:
    from rich.console import Console

    from hwopt.memory.forecast.sharding import Comparison
    from hwopt.planning.inputs import Inputs
    from hwopt.planning.plan import Plan
    from hwopt.tasks.preview import Preview


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
@hardware_option("profile")
@world_size_option
@click.option(
    "--nodes", type=click.IntRange(min=1), help="Number of machines (nodes); shows memory and communication under ZeRO and FSDP."
)
@click.option("--measure", is_flag=True, help="Run a step on this device instead of predicting its memory.")
@click.option("--sample", type=click.IntRange(min=1), help="Show this training sample as the model sees it instead.")
@click.option("--values", is_flag=True, help="Also list every value and its source.")
@format_option
def plan(
    profiles: tuple[str, ...],
    hardware: str,
    world_size: int,
    nodes: int | None,
    measure: bool,
    sample: int | None,
    values: bool,
    format_: str,
    **asked: Any,
) -> None:
    inputs = begin(profiles, **asked)
    if sample is not None:
        return show_sample(sample, profiles[0], asked["job"], asked["assignments"], inputs, format_)
    start_early(uses_device=measure or hardware == "detected" or "auto" in profiles)
    from hwopt import api
    from hwopt.memory.forecast.communication import Ranks
    from hwopt.report.memory import PlanProgress, PlanScreen
    from hwopt.report.terminal import Terminal

    ranks, console, single = Ranks(world_size, nodes or 1), Terminal(), len(profiles) == 1
    listener = PlanScreen(console) if single and format_ != "json" else PlanProgress()
    plans = []
    for profile in profiles:
        listener.on_trial(profile)
        given = {"hardware": hardware, "measure": measure, "world_size": world_size, "inputs": inputs, **asked}
        plans.append(api.plan(profile, gains=single, listener=listener, **given))
    parallel = [api.spread_over_ranks(plan, ranks) for plan in plans] if nodes or world_size > 1 else []
    if format_ == "json":
        found = [plan.to_dict() for plan in plans]
        for document, comparison in zip(found, parallel, strict=False):
            document["parallel"] = comparison.to_dict()
        say_json(found[0] if single else found)
    else:
        show_rest(console, plans, parallel, values)
    if refused := plans[0].refused:
        raise type(refused)(f"`hwopt run` refuses this: {refused}")


def show_rest(console: Console, plans: Sequence[Plan], parallel: Sequence[Comparison], values: bool) -> None:
    """Print what follows the screen of one plan: several plans side by side, the ways to use several ranks, every value."""
    from hwopt.report.comparison import show_plans
    from hwopt.report.memory import show_parallel
    from hwopt.report.terminal import show_problem, show_values

    single = len(plans) == 1
    if not single:
        show_problem(console, plans[0].hardware)
        show_plans(console, [plan.to_dict() for plan in plans])
    for plan, comparison in zip(plans, parallel, strict=False):
        show_parallel(console, comparison, "" if single else f"{plan.profile.name}, ")
    if single and values:
        console.print()
        show_values(console, plans[0])


def show_sample(sample: int, profile: str, job: Path | None, assignments: Sequence[str], inputs: Inputs, format_: str) -> None:
    """Show a training sample with the part that counts in the loss marked."""
    from hwopt import api

    found = api.preview(profile, job, assignments=assignments, sample=sample, inputs=inputs)
    say_result(format_, asdict(found), lambda console: show_preview(console, found))


def show_preview(console: Console, found: Preview) -> None:
    """Print length, label and text of a sample. The part in the loss is green, or in [[…]] if the output has no colours."""
    from rich.text import Text

    from hwopt.report.terminal import say

    others = "".join(f", {counted(number, f'{which} sample')}" for which, number in found.held_out.items())
    say(console, "sample", f"{found.sample:,} of {counted(found.samples, 'training sample')}{others}")
    in_loss = "" if found.tokens_in_loss is None else f", {found.tokens_in_loss:,} in the loss"
    if found.tokens is not None:
        say(console, "length", f"{counted(found.tokens, 'token')}{in_loss}")
    if found.label is not None:
        say(console, "label", found.label)
    coloured = console.is_terminal and not console.no_color
    if found.tokens_in_loss is not None:
        say(console, "marked", f"the part that counts in the loss, {'in green' if coloured else 'between [[ and ]]'}")
    for note in found.notes:
        say(console, "note", note, "yellow")
    text = Text()
    for span in found.spans:
        shown = printable(span.text)
        text.append(shown if coloured or not span.in_loss else f"[[{shown}]]", "bold green" if coloured and span.in_loss else "")
    console.print()
    console.print(text, soft_wrap=True)
