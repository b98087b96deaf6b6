"""`hwopt report`: runs as one HTML file; with --watch, a run that another process trains."""

from __future__ import annotations

import time
from pathlib import Path

import click

from hwopt.cli.options import say
from hwopt.errors import InputError, WorkerDiedError
from hwopt.text import counted


@click.command(
    help="Write one HTML file about a run, or about several runs and their differences. It needs no network. With --watch, "
    "follow one run from a second terminal until it ends, and exit with its exit code; Ctrl-C leaves the run alone."
)
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The file to write; default: report.html in the folder of the only run, or in this folder.",
)
@click.option("--force", is_flag=True, help="Overwrite the file of -o.")
@click.option("--watch", "follow", is_flag=True, help="Follow the run in this terminal instead of writing a file.")
@click.option(
    "--interval", type=click.FloatRange(min=0.1), default=1.0, show_default=True, help="Seconds between two updates of --watch."
)
def report(runs: tuple[Path, ...], output: Path | None, force: bool, follow: bool, interval: float) -> int:
    if follow:
        if len(runs) > 1 or output is not None:
            raise InputError("--watch follows one run and writes no file: hwopt report --watch RUN")
        return watch(runs[0], interval)
    from hwopt.records.run_files import REPORT
    from hwopt.report.page import page_of
    from hwopt.runs.record import read_records
    from hwopt.system.paths import OR_FORCE, refuse_output, write_text

    if output is not None:
        refuse_output(output, "-o", "" if force else OR_FORCE)
    records = read_records(list(dict.fromkeys(runs)))
    path = output or (records[0].folder / REPORT if len(records) == 1 else Path(REPORT))
    write_text(path, page_of(records))
    say(f"{path}: {path.stat().st_size / 1024:,.0f} KiB, {counted(len(records), 'run')}")
    return 0


def watch(run: Path, interval: float) -> int:
    """Show RUN until it ends, and return its exit code. A pipe gets one line per log point."""
    from rich.live import Live

    from hwopt.report.screen import log_line, panel
    from hwopt.report.terminal import Terminal
    from hwopt.runs.record import follow, last_warnings

    console = Terminal()
    record = None
    try:
        if console.is_terminal:
            with Live(console=console, auto_refresh=False) as live:
                for record in follow(run, interval, time.sleep):
                    live.update(panel(record, last_warnings(record.folder), console.width), refresh=True)
        else:
            shown = 0
            for record in follow(run, interval, time.sleep):
                for row in record.rows[shown:]:  # a resumed run has fewer rows for a while
                    say(log_line(row, record.total_steps))
                shown = len(record.rows)
    except KeyboardInterrupt:
        say(f"Stopped watching. The run {'ended' if record and record.alive is False else 'continues'}.")
        return 0
    assert record is not None
    if record.lost:
        raise WorkerDiedError(
            f"{record.folder}: no process of this host trains there, and status.json has no exit code: the process was killed "
            f"after step {record.step:,}. Resume it with --resume"
        )
    say(f"{record.folder}: {record.state}{f': {record.message}' if record.exit_code else ''}")
    return record.exit_code or 0
