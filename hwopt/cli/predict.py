"""`hwopt predict`: the rows of a file with the predictions of a run's model, or its answers in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import rich_click as click

from hwopt.cli.options import announce_loading, inference_options, say, warn
from hwopt.text import counted, printable

SHOWN = 20  # rows of a kind that are listed
SAMPLING = ("temperature", "top_p", "seed")  # options that need --do-sample


@click.command(
    help="Write the rows of FILE with the predictions of the model in RUN/final to a csv, jsonl or parquet file. Without FILE, "
    "answer in the terminal: a causal language model continues each line, or converses if it was trained on conversations."
)
@inference_options(file_needed=False)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The csv, jsonl or parquet file to write; needed for FILE.")
@click.option("--overwrite", is_flag=True, help="Replace the output file if it exists.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), help="Generated text: tokens to generate at most.  [default: 128]")
@click.option("--do-sample", is_flag=True, help="Generated text: draw tokens at random instead of taking the most probable ones.")
@click.option("--temperature", type=click.FloatRange(min=0, min_open=True), help="Generated text: with --do-sample.")
@click.option("--top-p", type=click.FloatRange(min=0, max=1, min_open=True), help="Generated text: with --do-sample.")
@click.option("--seed", type=click.IntRange(min=0), default=None, help="Generated text: with --do-sample.  [default: 0]")
def predict(do_sample: bool, **asked: Any) -> None:
    options = {name: value for name in ("max_new_tokens", *SAMPLING) if (value := asked.pop(name)) is not None}
    if not do_sample and (early := [name for name in SAMPLING if name in options]):
        raise click.UsageError(f"--{early[0].replace('_', '-')} needs --do-sample.")
    if do_sample:
        options["do_sample"] = True
    if asked["source"] is None:
        if given := [name for name in ("output", "overwrite", "batch_size") if asked[name]]:
            raise click.UsageError(f"--{given[0].replace('_', '-')} needs FILE: hwopt predict RUN FILE -o OUTPUT.")
        converse(asked["run"], asked["assignments"], options)
    elif asked["output"] is None:
        raise click.UsageError("Missing option '-o' / '--output', the csv, jsonl or parquet file to write.")
    else:
        predict_file(asked, options)


def predict_file(asked: Mapping[str, Any], generation: Mapping[str, Any]) -> None:
    """Write the predictions of a file, and say what was left out."""
    announce_loading()
    from hwopt import api

    with counting() as progress:
        report = api.predict(**asked, generation=generation or None, warn=warn, progress=progress)
    for note in report.notes:
        say(f"note: {note}")
    for what, reasons in (("no prediction", report.without_prediction), ("not in the output", report.unreadable)):
        for place, reason in list(reasons.items())[:SHOWN]:
            say(f"{what}: {place}: {reason}")
        if len(reasons) > SHOWN:
            say(f"{what}: … and {counted(len(reasons) - SHOWN, 'more row')}")
    left_out = f", {counted(len(report.unreadable), 'row')} left out" if report.unreadable else ""
    say(f"{report.output}: {counted(report.rows, 'row')}, {report.predicted:,} with {', '.join(report.columns)}{left_out}")


def converse(run: Path, assignments: Sequence[str], generation: Mapping[str, Any]) -> None:
    """Answer the lines of the standard input until its end. Only the answers are written to the standard output."""
    announce_loading()
    from hwopt import api
    from hwopt.errors import DataError, DoesNotFitError

    answerer = api.answerer(run, assignments=assignments, generation=generation)
    for note in answerer.loaded.notes:
        say(f"note: {note}", err=True)
    what = "Ask; an empty line begins a new conversation" if answerer.chat else "Type the begin of a text"
    if sys.stdin.isatty():
        say(f"{what}. Ctrl-D ends.", err=True)
    for line in lines_typed():
        if not line.strip():
            answerer.forget()
            continue
        try:
            ended = answerer.answer(line, lambda part: click.echo(printable(part), nl=False))
        except (DataError, DoesNotFitError) as error:
            say(f"no answer: {error}. {'An empty line begins a new conversation' if answerer.chat else 'Type less'}", err=True)
            continue
        click.echo()
        if not ended:
            most = answerer.generator.max_new_tokens
            say(f"the answer is cut at {counted(most, 'token')} (--max-new-tokens), or at the model's limit", err=True)


def lines_typed() -> Iterator[str]:
    """The lines of the standard input, with a prompt if it is a terminal."""
    if not sys.stdin.isatty():
        yield from (line.rstrip("\r\n") for line in sys.stdin)
        return
    while True:
        try:
            yield input("> ")
        except EOFError:
            click.echo()
            return


@contextmanager
def counting() -> Iterator[Callable[[int, int], None]]:
    """A function that shows (how many rows are done, of how many) as a progress bar, if standard error is a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from hwopt.report.terminal import Terminal

    console, columns = Terminal(file=sys.stderr), (BarColumn(), MofNCompleteColumn(), TextColumn("rows"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
