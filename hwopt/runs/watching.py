"""Follow a run of another process by the files of its folder. Nothing in the run changes, and nothing is locked."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

from hwopt.report.run_record import RunRecord
from hwopt.runs.record import is_run_folder, process_alive, read_record
from hwopt.runs.run_log import LOG

GRACE = 3.0
"""Seconds without a process and without an exit code after which a run counts as ended: a launcher may start its ranks anew."""
MAX_WARNINGS = 3


def follow(folder: Path, interval: float, sleep: Callable[[float], None]) -> Iterator[RunRecord]:
    """The record of the run every `interval` seconds, until the run has ended. The last one is that of the ended run.

    Waits for the plan of a process that prepares its data. Raises InputError if `folder` is no run folder.
    """
    missing = 0.0
    while not is_run_folder(folder) and process_alive(folder):
        sleep(interval)
    while True:
        record = read_record(folder)
        missing = missing + interval if record.lost else 0.0
        yield record
        if missing > GRACE or (record.exit_code is not None and not record.alive):
            return
        sleep(interval)


def last_warnings(folder: Path) -> list[str]:
    """The last MAX_WARNINGS warnings of run.log."""
    path = folder / LOG
    if not path.exists():
        return []
    with open(path, encoding="utf-8", errors="replace") as file:
        return [line.rstrip("\n") for line in deque((line for line in file if line.startswith("WARNING")), maxlen=MAX_WARNINGS)]
