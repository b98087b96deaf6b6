"""`hwopt evaluate`: the metrics of a run's model on a file."""

from __future__ import annotations

from typing import Any

import rich_click as click

from hwopt.cli.options import announce_loading, format_option, inference_options, say_result, warn


@click.command(help="Evaluate the model in RUN/final on FILE: all metrics, and for classification those of each class.")
@inference_options()
@format_option
def evaluate(format_: str, **asked: Any) -> None:
    announce_loading()
    from hwopt import api
    from hwopt.report.classes import show_evaluation

    report = api.evaluate(**asked, warn=warn)
    say_result(format_, report.to_dict(), lambda console: show_evaluation(console, report))
