"""`hwopt preview`: one training sample as the model sees it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import rich_click as click

from hwopt.cli.options import begin, format_option, profile_option, quiet_transformers, source_options


@click.command(help="Show a training sample as the model sees it, with the part that counts in the loss marked.")
@source_options
@profile_option
@click.option("--sample", type=click.IntRange(min=1), default=1, show_default=True, help="Number of the sample, from 1.")
@format_option
def preview(
    job: Path | None,
    profile: str,
    assignments: tuple[str, ...],
    sample: int,
    format_: str,
) -> None:
    inputs = begin([profile], job, assignments, None)
    from hwopt import api

    quiet_transformers()
    found = api.preview(profile, job, assignments=assignments, sample=sample, inputs=inputs)
    if format_ == "json":
        click.echo(json.dumps(asdict(found), indent=2, ensure_ascii=False))
        return
    from hwopt.report.preview import show_preview
    from hwopt.report.terminal import Terminal

    show_preview(Terminal(), found)
