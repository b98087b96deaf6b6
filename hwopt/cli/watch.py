"""`hwopt watch`: a run that another process trains."""

from __future__ import annotations

import time
from pathlib import Path

import click

from hwopt.cli.options import say
from hwopt.errors import WorkerDiedError


@click.command(
    help="Follow RUN from a second terminal, until it ends; Ctrl-C leaves the run alone. Exits with the run's exit code. "
    "Output that is not a terminal gets one line per log point."
)
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--interval", type=click.FloatRange(min=0.1), default=1.0, show_default=True, help="Seconds between two updates.")
def watch(run: Path, interval: float) -> int:
    from hwopt.report.terminal import Terminal
    from hwopt.runs.watching import follow, last_warnings

    console = Terminal()
    record = None
    try:
        if console.is_terminal:
            from rich.live import Live

            from hwopt.report.watch_screen import panel

            with Live(console=console, auto_refresh=False) as live:
                for record in follow(run, interval, time.sleep):
                    live.update(panel(record, last_warnings(record.folder), console.width), refresh=True)
        else:
            from hwopt.report.watch_screen import plain_line

            shown = 0
            for record in follow(run, interval, time.sleep):
                for row in record.rows[shown:]:  # a resumed run has fewer rows for a while
                    say(plain_line(record, row))
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
