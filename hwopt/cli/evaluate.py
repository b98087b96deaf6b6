"""`hwopt evaluate`: the metrics of a run's model on a file."""

from __future__ import annotations

import json
from pathlib import Path

import rich_click as click

from hwopt.cli.options import announce_loading, format_option, inference_options, quiet_libraries, quiet_transformers, say


@click.command(help="Evaluate the model in RUN/final on FILE: all metrics, and for classification those of each class.")
@inference_options
@format_option
def evaluate(run: Path, source: str, assignments: tuple[str, ...], batch_size: int | None, format_: str) -> None:
    quiet_libraries()
    announce_loading()
    from hwopt import api

    quiet_transformers()
    report = api.evaluate(
        run,
        source,
        assignments=assignments,
        batch_size=batch_size,
        warn=lambda message: say(f"WARNING: {message}", err=True),
    )
    if format_ == "json":
        click.echo(json.dumps(report.to_dict(), indent=2))
        return
    from hwopt.report.inference import show_evaluation
    from hwopt.report.terminal import Terminal

    show_evaluation(Terminal(), report)
