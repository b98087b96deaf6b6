"""The errors of the ranks of one launch, and which of them is the cause.

A rank writes its error to the file that torch elastic names in TORCHELASTIC_ERROR_FILE and reads back into
`ProcessFailure.error_file_data`. Elastic's rule "the earliest error is the cause" is wrong: docs/decisions/0012-termination.md.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hwopt.config.aliases import option_for
from hwopt.errors import StorageError, WorkerDiedError
from hwopt.records.run_files import read_status
from hwopt.system.atomic_folder import write_json
from hwopt.system.signals import EXIT_CODES

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

LAUNCH_FOLDER = "HWOPT_LAUNCH_FOLDER"
"""The environment variable that `run_ranks` sets for its ranks: the temporary folder of the launch."""
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
WATCHDOG_SECONDS = 1
"""A rank that died within so many seconds of the kill of a watchdog was killed by it. Elastic's timestamps are whole seconds."""
LAUNCHER_SECONDS = 15
"""A rank that died so many seconds after the first failure was killed by the launcher, which does so 30 s after SIGTERM."""


@dataclass(frozen=True)
class LaunchOutcome:
    """The exit code of a launch, and the message to print ("" for none)."""

    exit_code: int
    message: str


@dataclass(frozen=True)
class RankError(LaunchOutcome):
    timestamp: float
    secondhand: bool = False  # another rank caused this error
    killed_others: bool = False  # the watchdog of this rank killed the other ranks


def report_error(exit_code: int, message: str, *, secondhand: bool = False, killed_others: bool = False) -> bool:
    """Write the error of this rank for `run_ranks`. False if it is none of its ranks, or not written: the caller prints it."""
    path = os.environ.get(ERROR_FILE)
    if LAUNCH_FOLDER not in os.environ or not path:
        return False
    try:
        write_json(Path(path), asdict(RankError(exit_code, message, time.time(), secondhand, killed_others)))
    except StorageError:
        return False
    return True


def root_cause(failures: Mapping[int, ProcessFailure], run_folder: Path | None) -> LaunchOutcome:
    """The error that made a launch fail.

    In this order: the rank whose watchdog killed the others, a rank that died without a report, the first error that no other
    rank caused, and a signal that a rank received.
    """
    written = {rank: failure.error_file_data for rank, failure in failures.items()}
    errors = {rank: RankError(**error) for rank, error in written.items() if "exit_code" in error}  # none of a killed rank
    first_death = min((failure.timestamp for failure in failures.values()), default=0)
    killers = [error for error in errors.values() if error.killed_others and error.timestamp <= first_death + WATCHDOG_SECONDS]
    if killers:
        return min(killers, key=lambda error: error.timestamp)
    for rank, failure in failures.items():
        killed = failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM  # the launcher sends SIGTERM
        if rank not in errors and killed and failure.timestamp <= first_death + LAUNCHER_SECONDS:
            return LaunchOutcome(WorkerDiedError.exit_code, f"error: rank {rank} {describe_death(-failure.exitcode)}")
    own = [error for error in errors.values() if error.exit_code not in EXIT_CODES.values()]
    if own:
        return first_error(own, run_folder)
    if errors and all(failure.exitcode in (-signal.SIGTERM, *EXIT_CODES.values()) for failure in failures.values()):
        return min(errors.values(), key=lambda error: error.timestamp)  # a signal to one rank stops all of them
    codes = ", ".join(f"rank {rank}: {failure.exitcode}" for rank, failure in sorted(failures.items())) or "unknown"
    message = f"error: all ranks exited without an error report (exit codes: {codes})"
    return LaunchOutcome(WorkerDiedError.exit_code, message)


def first_error(errors: list[RankError], run_folder: Path | None) -> LaunchOutcome:
    """The earliest error that no other rank caused, else the earliest one."""
    first = min(errors, key=lambda error: (error.secondhand or error.exit_code == WorkerDiedError.exit_code, error.timestamp))
    if first.secondhand and run_folder is not None:
        # the launcher ended the rank at fault before that rank could report; its message may be in status.json
        code, message = read_status(run_folder)
        if code == first.exit_code:
            return replace(first, message=f"error: {message}")
    return first


def describe_death(number: int) -> str:
    """How a signal ended a rank, as the predicate of a sentence."""
    if number == 9:
        option = option_for("num_workers")
        return f"was killed (SIGKILL). The system does this when the host is out of memory: try {option} = 0"
    name = next((each.name for each in signal.Signals if each == number), f"signal {number}")
    return f"was ended by {name}. See its last output above"
