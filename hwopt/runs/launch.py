"""`hwopt run --processes N`: start the ranks with Accelerate's launcher, and print one message if they fail.

Accelerate's launcher turns every exit code into 1. So a rank reports its error to this process (`rank_errors`), which prints the
cause and exits with its code. The ranks run in sessions of their own: a signal of the terminal reaches this process only, which
forwards it once, as SIGTERM: SIGINT would print a traceback in a rank that is still importing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from hwopt.errors import InputError, StorageError, exit_code_of
from hwopt.hardware.detect import cpu_cores
from hwopt.records.run_files import status_code
from hwopt.runs.folder import write_status
from hwopt.runs.rank_errors import LAUNCH_FOLDER, LaunchOutcome, root_cause
from hwopt.system import signals
from hwopt.system.ranks import rank_and_world
from hwopt.system.signals import EXIT_CODES
from hwopt.text import truncate

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

RUN_FOLDER_FILE = "run-folder"  # the file in the launch folder that holds the path of the run folder
RANKS_PER_CORE = 4  # the limit without CUDA devices


def ranks_to_start(requested: str, environment: Mapping[str, str]) -> int:
    """How many ranks `--processes requested` starts; 1: this process trains. Raises InputError if it is not possible here."""
    if LAUNCH_FOLDER in environment:
        return 1  # this process is one of the ranks
    if requested != "auto" and not re.fullmatch(r"0*[1-9]\d{0,5}", requested):
        what = "expected a whole number above 0, or auto (one process for each CUDA device)"
        raise InputError(f"--processes {truncate(requested)}: {what}")
    if found := [name for name in ("RANK", "WORLD_SIZE") if name in environment]:
        raise InputError(
            f"--processes {requested}: another launcher started this process ({', '.join(found)} set). "
            "Leave --processes out, or start without the launcher"
        )
    if requested == "1":
        return 1
    import torch

    devices = torch.cuda.device_count()  # creates no CUDA context, which would take device memory
    number = max(1, devices) if requested == "auto" else int(requested)
    limit = devices or RANKS_PER_CORE * cpu_cores()
    if number > limit:
        cores = f"too many for {cpu_cores()} CPU core(s) without a CUDA device"
        why = f"each process needs its own CUDA device, found {devices}" if devices else cores
        raise InputError(f"--processes {requested}: {why}. Give {limit} or fewer")
    return number


def run_ranks(number: int, arguments: Sequence[str]) -> LaunchOutcome:
    """Run `hwopt ARGUMENTS` on `number` ranks of this host and return the outcome. No process of the launch is left running."""
    signals.install_handlers()
    with tempfile.TemporaryDirectory(prefix="hwopt-launch-", ignore_cleanup_errors=True) as folder:
        launch_folder = Path(folder)
        try:
            with signals.deferred(forward_signal):
                outcome = launch(number, arguments, launch_folder)
            if code := signals.received():
                outcome = LaunchOutcome(code, "interrupted" if code == EXIT_CODES[signal.SIGINT] else "terminated")
        except BaseException as error:
            kill_remaining(launch_folder)
            code = signals.received() or exit_code_of(error)
            record_outcome(launch_folder, LaunchOutcome(code, str(error) or type(error).__name__))
            raise
        if outcome.exit_code:
            kill_remaining(launch_folder)
        record_outcome(launch_folder, outcome)
        return outcome


def forward_signal(number: int) -> None:
    """Send SIGTERM to the ranks, which finish their step, save and exit. Without ranks, raise what ends this process."""
    ranks = psutil.Process().children()
    if not ranks:
        raise signals.exception_for(EXIT_CODES[signal.Signals(number)])
    signals.announce_stop()
    for rank in ranks:
        with contextlib.suppress(psutil.Error):
            rank.terminate()


def launch(number: int, arguments: Sequence[str], launch_folder: Path) -> LaunchOutcome:
    """Run Accelerate's launcher in this process and return the outcome of the ranks."""
    from accelerate.commands.launch import launch_command, launch_command_parser
    from accelerate.utils import patch_environment
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # --multi_gpu also on CPUs: with --cpu the launcher starts a single process, without a warning
    launcher = ["--multi_gpu", "--num_processes", str(number), "--num_machines", "1", "--main_process_port", "0"]
    neutral = ["--mixed_precision", "no", "--dynamo_backend", "no", "--log_dir", str(launch_folder)]
    options = launch_command_parser().parse_args([*launcher, *neutral, "-m", "hwopt", *arguments])
    with patch_environment(**rank_environment(number, launch_folder)):
        logging.disable(logging.CRITICAL)  # the launcher would log that it ends the other ranks, and a table of exit codes
        try:
            launch_command(options)
        except ChildFailedError as error:
            return launch_outcome(launch_folder, error.failures)
        except SignalException as error:
            raise signals.exception_for(EXIT_CODES.get(error.sigval, EXIT_CODES[signal.SIGTERM])) from None
        except ValueError as error:
            raise InputError(f"Accelerate's launcher rejects its settings: {error}. See `accelerate env`") from error
        finally:
            logging.disable(logging.NOTSET)
    return launch_outcome(launch_folder, {})


def launch_outcome(launch_folder: Path, failures: Mapping[int, ProcessFailure]) -> LaunchOutcome:
    """Success if no rank failed and the run's status says so, else the cause of the failure."""
    folder = read_run_folder(launch_folder)
    if not failures and folder is not None and status_code(folder) == 0:
        return LaunchOutcome(0, "")
    return root_cause(failures, folder)


def rank_environment(number: int, launch_folder: Path) -> dict[str, str]:
    """The environment variables that the ranks get in addition to those of this process."""
    import torch

    # this process handles SIGINT and SIGTERM; the launcher handles the others, unless they are ignored (nohup)
    handled = [each.name for each in (signal.SIGHUP, signal.SIGQUIT) if signal.getsignal(each) is not signal.SIG_IGN]
    variables = {LAUNCH_FOLDER: str(launch_folder), "PET_SIGNALS_TO_HANDLE": ",".join(handled)}
    if not os.environ.get("OMP_NUM_THREADS"):
        variables["OMP_NUM_THREADS"] = str(max(1, cpu_cores() // number))
    if not torch.cuda.device_count():
        variables["ACCELERATE_USE_CPU"] = "true"
    return variables


def record_outcome(launch_folder: Path, outcome: LaunchOutcome) -> None:
    """Write the outcome to `status.json` of the run, unless a rank already wrote this exit code."""
    folder = read_run_folder(launch_folder)
    if folder is not None and folder.is_dir() and status_code(folder) != outcome.exit_code:
        with contextlib.suppress(StorageError):
            write_status(folder, outcome.exit_code, outcome.message.removeprefix("error: "))


def kill_remaining(launch_folder: Path) -> None:
    """Kill every process of this launch that still runs, such as the data-loading workers of a killed rank."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(LAUNCH_FOLDER) == str(launch_folder):
                process.kill()


def read_run_folder(launch_folder: Path) -> Path | None:
    """The run folder that rank 0 wrote to the launch folder, or None."""
    file = launch_folder / RUN_FOLDER_FILE
    return Path(file.read_text(encoding="utf-8")) if file.exists() else None


def broadcast_folder(folder: Path, checkpoint: Path | None, code: int) -> tuple[Path, Path | None, int]:
    """Rank 0's arguments on every rank: ranks that look at different times may find different folders.

    Rank 0 of `run_ranks` also writes the run folder to the launch folder, unless it failed (`code` above 0).
    """
    rank, world_size = rank_and_world(os.environ)
    if world_size > 1:
        import torch.distributed as dist

        values = [str(folder), str(checkpoint) if checkpoint else None, code]
        dist.broadcast_object_list(values, 0)
        folder, checkpoint, code = Path(str(values[0])), Path(str(values[1])) if values[1] else None, int(values[2] or 0)
    if rank == 0 and LAUNCH_FOLDER in os.environ and code <= 0:
        (Path(os.environ[LAUNCH_FOLDER]) / RUN_FOLDER_FILE).write_text(str(folder.absolute()), encoding="utf-8")
    return folder, checkpoint, code
