"""`hwopt detect`: what a bug report needs: versions, the machine, and the decision of each plugin on it."""

from __future__ import annotations

import json
from dataclasses import asdict

import rich_click as click

from hwopt.cli.options import announce_loading, format_option, quiet_libraries


@click.command(
    help="Show versions, hardware, and what each plugin could do here (for a model like BERT-base), or why not: for a bug report."
)
@format_option
def detect(format_: str) -> None:
    quiet_libraries()
    announce_loading()
    from hwopt.planning.capabilities import survey

    found = survey()
    if format_ == "json":
        click.echo(json.dumps(asdict(found), indent=2, default=str))
        return
    from hwopt.report.terminal import Terminal, show_survey

    show_survey(Terminal(), found)
