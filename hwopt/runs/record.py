"""Reads a run folder into a RunRecord, whether the run is finished, trains, or was killed; or again and again until it ends."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from hwopt.errors import InputError
from hwopt.records.run_files import (
    EVIDENCE,
    FINAL,
    LOG,
    MEMORY,
    METRICS,
    PLAN,
    PROCESSES,
    SUMMARY,
    metric_values,
    read_evidence,
    read_json_lines,
    read_object,
    read_status,
)
from hwopt.records.run_record import RunRecord
from hwopt.runs.folder import in_use_on_this_host, read_owner
from hwopt.text import printable

PLAN_KEYS = {"profile", "hardware", "software", "model", "job", "training", "batch", "plugins"}


def is_run_folder(folder: Path) -> bool:
    return (folder / PLAN).is_file()


def read_record(folder: Path) -> RunRecord:
    """The record of a run folder. Raises InputError if `folder` is none, or if its plan cannot be read."""
    if folder.name in (FINAL, PLAN) and is_run_folder(folder.parent):
        folder = folder.parent
    shown = printable(str(folder))
    if not folder.is_dir():
        raise InputError(f"{shown}: no such run folder. `ls runs` lists the runs of this folder")
    if not is_run_folder(folder):
        raise InputError(f"{shown} is not a run folder: it has no plan.json. Give a folder that `hwopt run` wrote")
    plan = read_object(folder / PLAN)
    if not plan.keys() >= PLAN_KEYS:
        raise InputError(f"{folder / 'plan.json'} is not a plan of hwopt, or it is corrupt")
    try:
        exit_code, message = read_status(folder)
        rows = map(metric_values, read_json_lines(folder / METRICS))
        return RunRecord(
            folder,
            plan,
            read_json_lines(folder / PROCESSES),
            [row for row in rows if row.get("step") is not None],
            read_evidence(folder / EVIDENCE),
            read_object(folder / MEMORY),
            read_object(folder / SUMMARY),
            exit_code,
            message,
            process_alive(folder),
        )
    except OSError as error:
        raise InputError(f"{folder} cannot be read: {error.strerror or error}") from error


def read_records(folders: Sequence[Path]) -> list[RunRecord]:
    """The records of run folders. Raises InputError for a run that has no metrics yet."""
    records = [read_record(folder) for folder in folders]
    for record in records:
        if not record.rows:
            raise InputError(
                f"{record.folder} has no metrics yet: {record.state}. {record.message or 'Wait for its first log point'}"
            )
    return records


def process_alive(folder: Path) -> bool | None:
    """Whether a process trains in `folder`; None if it is one of another host, which this host cannot see."""
    host = read_owner(folder).get("host") if folder.is_dir() else None
    return None if host not in (None, platform.node()) else in_use_on_this_host(folder)


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
