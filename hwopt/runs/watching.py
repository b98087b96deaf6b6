"""Follow a run of another process by the files of its folder. Nothing in the run changes, and nothing is locked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from hwopt.records.run_record import RunRecord
from hwopt.runs.record import LOG, is_run_folder, process_alive, read_record

GRACE = 3.0
"""Seconds without a process and without an exit code after which a run counts as ended: a launcher may restart its ranks."""
MAX_WARNINGS = 3


def follow(folder: Path, interval: float, sleep: Callable[[float], None]) -> Iterator[RunRecord]:
    """The record of the run every `interval` seconds, until the run has ended. The last one is that of the ended run.

    Waits for the plan of a process that prepares its data. Raises InputError if `folder` is not a run folder.
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
    if not (folder / LOG).exists():
        return []
    lines = (folder / LOG).read_text(encoding="utf-8", errors="replace").splitlines()
    return [line for line in lines if line.startswith("WARNING")][-MAX_WARNINGS:]
