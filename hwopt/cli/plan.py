"""`hwopt plan`: what `run` would do, and why, without doing it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click

from hwopt.cli.options import format_option, job_and_profile, quiet_libraries, quiet_transformers

if TYPE_CHECKING:
    from hwopt.plan import Plan


@click.command(
    help="Show plugin by plugin what `run` would do and why; by default for the profile's card, which need not be there."
)
@job_and_profile
@click.option(
    "--hardware",
    type=click.Choice(["profile", "detected"]),
    default="profile",
    show_default=True,
    help="Plan for the card, or this machine.",
)
@click.option("--world-size", type=click.IntRange(min=1), default=1, show_default=True, help="Number of ranks.")
@format_option
def plan(
    job: Path | None,
    profile: str,
    assignments: tuple[str, ...],
    memory_limit: str | None,
    strict: bool,
    hardware: str,
    world_size: int,
    format_: str,
) -> None:
    quiet_libraries()
    from rich.console import Console

    from hwopt import api
    from hwopt.report.memory import show_memory
    from hwopt.report.screen import show_plan, show_values

    quiet_transformers()

    def resolved(changes: Sequence[str] = ()) -> Plan:
        return api.resolve(
            profile,
            job,
            assignments=[*assignments, *changes],
            hardware="detected" if hardware == "detected" or profile == "auto" else "profile",
            strict=strict,
            memory_limit=memory_limit,
            world_size=world_size,
        )

    planned = api.with_memory(resolved(), resolved)
    if format_ == "json":
        click.echo(json.dumps(planned.to_dict(), indent=2, default=str))
        return
    console = Console()
    show_plan(console, planned)
    show_memory(console, planned)
    console.print()
    show_values(console, planned)
