"""`hwopt report`: runs as one HTML file."""

from __future__ import annotations

from pathlib import Path

import click

from hwopt.cli.options import say
from hwopt.errors import InputError


@click.command(help="Write one HTML file about a run, or about several runs and their differences. It needs no network.")
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The file to write; default: report.html in the folder of the only run, or in this folder.",
)
def report(runs: tuple[Path, ...], output: Path | None) -> None:
    from hwopt.runs.record import read_record
    from hwopt.runs.report_file import REPORT, write_page

    records = [read_record(run) for run in dict.fromkeys(runs)]
    for record in records:
        if not record.rows:
            raise InputError(
                f"{record.folder} has no metrics yet: {record.state}. {record.message or 'Wait for its first log point'}"
            )
    path = output or (records[0].folder / REPORT if len(records) == 1 else Path(REPORT))
    write_page(records, path)
    say(f"{path}: {path.stat().st_size / 1024:,.0f} KiB, {len(records)} run{'s' if len(records) > 1 else ''}")
