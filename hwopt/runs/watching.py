"""Follow a run of another process by the files of its folder. Nothing in the run changes, and nothing is locked."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from hwopt.records.run_record import MetricRow, RunRecord
from hwopt.runs.processes import METRICS, objects
from hwopt.runs.record import LOG, is_run_folder, metric_rows, process_alive, read_record

GRACE = 3.0
"""Seconds without a process and without an exit code after which a run counts as ended: a launcher may restart its ranks."""
MAX_WARNINGS, LOG_BYTES = 3, 1 << 16


def follow(folder: Path, interval: float, sleep: Callable[[float], None]) -> Iterator[RunRecord]:
    """The record of the run every `interval` seconds, until the run has ended. The last one is that of the ended run.

    Waits for the plan of a process that prepares its data. Raises InputError if `folder` is not a run folder.
    """
    missing, tail = 0.0, MetricsTail(folder / METRICS)
    while not is_run_folder(folder) and process_alive(folder):
        sleep(interval)
    while True:
        record = read_record(folder, tail.read())
        missing = missing + interval if record.lost else 0.0
        yield record
        if missing > GRACE or (record.exit_code is not None and not record.alive):
            return
        sleep(interval)


class MetricsTail:
    """Reads a growing metrics.jsonl.

    Each call parses only what was added. A resumed run rewrites the file, with fewer rows.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[MetricRow] = []
        self.file = 0
        """The number of the file in its file system."""
        self.offset = 0

    def read(self) -> list[MetricRow]:
        """All complete rows so far."""
        try:
            with open(self.path, "rb") as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self.file or found.st_size < self.offset:
                    self.file, self.offset, self.rows = found.st_ino, 0, []
                file.seek(self.offset)
                complete, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return self.rows
        self.offset += len(complete) + len(newline)
        self.rows = [*self.rows, *metric_rows(objects(complete.decode("utf-8", errors="replace")))]
        return self.rows


def last_warnings(folder: Path) -> list[str]:
    """The last MAX_WARNINGS warnings in the end of run.log, as far as its last LOG_BYTES hold them."""
    try:
        with open(folder / LOG, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LOG_BYTES))
            lines = file.read().decode("utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    return [line for line in lines if line.startswith("WARNING")][-MAX_WARNINGS:]
