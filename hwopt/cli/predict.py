"""`hwopt predict`: the rows of a file with the predictions of a run's model."""

from __future__ import annotations

from pathlib import Path

import rich_click as click

from hwopt.cli.options import announce_loading, inference_options, quiet_libraries, quiet_transformers, say

SHOWN = 20
"""Rows of a kind that are listed."""


@click.command(help="Write the rows of FILE with the predictions of the model in RUN/final to a csv, jsonl or parquet file.")
@inference_options
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="The csv, jsonl or parquet file to write.")
@click.option("--overwrite", is_flag=True, help="Replace the output file if it exists.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), help="Generated text: tokens to generate at most.  [default: 128]")
@click.option("--do-sample", is_flag=True, help="Generated text: draw tokens at random instead of taking the most probable ones.")
@click.option("--temperature", type=click.FloatRange(min=0, min_open=True), help="Generated text: with --do-sample.")
@click.option("--top-p", type=click.FloatRange(min=0, max=1, min_open=True), help="Generated text: with --do-sample.")
@click.option("--seed", type=click.IntRange(min=0), default=None, help="Generated text: with --do-sample.  [default: 0]")
def predict(
    run: Path,
    source: str,
    assignments: tuple[str, ...],
    output: Path,
    overwrite: bool,
    batch_size: int | None,
    max_new_tokens: int | None,
    do_sample: bool,
    temperature: float | None,
    top_p: float | None,
    seed: int | None,
) -> None:
    given = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    sampling = [name for name in ("temperature", "top_p", "seed") if given[name] is not None]
    if sampling and not do_sample:
        raise click.UsageError(f"--{sampling[0].replace('_', '-')} needs --do-sample.")
    quiet_libraries()
    announce_loading()
    from hwopt import api
    from hwopt.report.inference import counting
    from hwopt.report.terminal import Terminal

    quiet_transformers()
    options = {name: value for name, value in given.items() if value is not None} | ({"do_sample": True} if do_sample else {})
    with counting(Terminal(stderr=True), "rows") as progress:
        report = api.predict(
            run,
            source,
            output,
            assignments=assignments,
            overwrite=overwrite,
            batch_size=batch_size,
            generation=options or None,
            warn=lambda message: say(f"WARNING: {message}", err=True),
            progress=progress,
        )
    for note in report.notes:
        say(f"note: {note}")
    for what, reasons in (("no prediction", report.without_prediction), ("not in the output", report.unreadable)):
        for place, reason in list(reasons.items())[:SHOWN]:
            say(f"{what}: {place}: {reason}")
        if len(reasons) > SHOWN:
            say(f"{what}: … and {len(reasons) - SHOWN:,} more rows")
    left_out = f", {len(report.unreadable):,} rows left out" if report.unreadable else ""
    say(f"{report.output}: {report.rows:,} rows, {report.predicted:,} with {', '.join(report.columns)}{left_out}")
