"""The ranks of `hwopt run --processes N`: Accelerate's launcher starts them, and how they end is said once.

The launcher turns every exit code into 1 and prints a traceback of its own, and each rank would print the same message. So ranks
print no error here: each leaves a note in a folder of the launch, and this process says what went wrong first and exits with its
code, which is also the one in `status.json`. Ranks have sessions of their own, so that what a terminal sends to its foreground
reaches this process alone, and them once: as SIGTERM, which leaves no traceback behind while a rank is still importing.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from hwopt.errors import InputError, StorageError, WorkerDiedError, exit_code_of
from hwopt.hardware.detect import cpu_cores
from hwopt.system import signals
from hwopt.system.ranks import rank_and_world
from hwopt.system.signals import EXIT_CODES
from hwopt.text import truncate

NOTES = "HWOPT_LAUNCH_NOTES"
"""The environment variable that makes a process one of these ranks: the folder for their notes."""
FOLDER_NOTE = "run-folder"
RANKS_OF_A_CORE = 4
"""At most, without CUDA devices: enough to try several ranks on a small machine."""


@dataclass(frozen=True)
class Ending:
    """How a rank, or all of them, ended: the exit code, and what the screen says of it."""

    exit_code: int
    message: str
    secondhand: bool = False
    """Whether another rank is at fault."""
    time: float = 0.0
    kills: bool = False
    """Whether the rank has killed the others then."""


def ranks_to_start(asked: str, environment: Mapping[str, str]) -> int:
    """How many ranks `--processes asked` starts; 1: none, this process trains. Raises InputError for what cannot be had."""
    if NOTES in environment:
        return 1  # this is one of them
    if asked != "auto" and not re.fullmatch(r"0*[1-9]\d{0,5}", asked):
        raise InputError(f"--processes {truncate(asked)}: expected a whole number above 0, or auto (one for each CUDA device)")
    if found := [name for name in ("RANK", "WORLD_SIZE") if name in environment]:
        raise InputError(
            f"--processes {asked}: a launcher starts the ranks already ({', '.join(found)} set). "
            "Leave --processes out, or the launcher"
        )
    if asked == "1":
        return 1
    import torch

    devices = torch.cuda.device_count()  # makes no context, whose memory the ranks would miss
    number = max(1, devices) if asked == "auto" else int(asked)
    if 0 < devices < number:
        raise InputError(
            f"--processes {asked}: each needs a CUDA device of its own, and there are {devices}; give {devices} or fewer"
        )
    most = RANKS_OF_A_CORE * cpu_cores()
    if not devices and number > most:
        raise InputError(
            f"--processes {asked}: on the {cpu_cores()} core(s) of this machine they would starve; give {most} or fewer"
        )
    return number


def run_ranks(number: int, arguments: Sequence[str]) -> Ending:
    """Run `hwopt ARGUMENTS` on `number` ranks of this machine, and return how that ended. Nobody is left running.

    Raises KeyboardInterrupt or SystemExit at a signal, once the ranks are gone.
    """
    signals.listen()
    with tempfile.TemporaryDirectory(prefix="hwopt-launch-", ignore_cleanup_errors=True) as folder:
        notes = Path(folder)
        try:
            with signals.patience(pass_on):
                ending = launched(number, arguments, notes)
            if code := signals.received():
                ending = Ending(code, "interrupted" if code == EXIT_CODES[signal.SIGINT] else "terminated")
        except BaseException as error:
            end_what_is_left(notes)
            record_outcome(notes, Ending(signals.received() or exit_code_of(error), str(error) or type(error).__name__))
            raise
        if ending.exit_code:
            end_what_is_left(notes)
        record_outcome(notes, ending)
        return ending


def pass_on(number: int) -> None:
    """A signal to the ranks, which finish their step, save and end. Raises what ends this process where there are none yet."""
    ranks = psutil.Process().children()
    if not ranks:
        raise signals.ending(EXIT_CODES[signal.Signals(number)])
    signals.acknowledge()
    for rank in ranks:
        with contextlib.suppress(psutil.Error):
            rank.terminate()


def launched(number: int, arguments: Sequence[str], notes: Path) -> Ending:
    """Accelerate's launcher, in this process, with what the ranks' notes say of its end."""
    from accelerate.commands.launch import launch_command, launch_command_parser
    from accelerate.utils import patch_environment
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # --multi_gpu also on CPUs: with --cpu the launcher starts a single process and does not say so
    launcher = ["--multi_gpu", "--num_processes", str(number), "--num_machines", "1", "--main_process_port", "0"]
    neutral = ["--mixed_precision", "no", "--dynamo_backend", "no", "--log_dir", str(notes)]
    asked = launch_command_parser().parse_args([*launcher, *neutral, "-m", "hwopt", *arguments])
    with quiet(), patch_environment(**environment_of_ranks(number, notes)):
        try:
            launch_command(asked)
        except ChildFailedError as error:
            return outcome_of(notes, error.failures)
        except SignalException as error:
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(signals.EXIT_CODES[signal.SIGTERM]) from None
        except ValueError as error:
            raise InputError(f"Accelerate's launcher refuses its own settings: {error}. See `accelerate env`") from error
    return outcome_of(notes, {})


def environment_of_ranks(number: int, notes: Path) -> dict[str, str]:
    """What the ranks get beside this process's environment."""
    import torch

    # SIGINT and SIGTERM are heard here; of the others, those that are not ignored (nohup) must not leave ranks behind
    others = [name for name in ("SIGHUP", "SIGQUIT") if hasattr(signal, name)]
    heard = [name for name in others if signal.getsignal(getattr(signal, name)) is not signal.SIG_IGN]
    found = {NOTES: str(notes), "PET_SIGNALS_TO_HANDLE": ",".join(heard)}
    if not os.environ.get("OMP_NUM_THREADS"):
        found["OMP_NUM_THREADS"] = str(max(1, cpu_cores() // number))
    if not torch.cuda.device_count():
        found["ACCELERATE_USE_CPU"] = "true"
    return found


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the launcher's own log: that it ends the other ranks, and a table of exit codes."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def outcome_of(notes: Path, failures: Mapping[int, Any]) -> Ending:
    """The ending of all ranks, from their notes and from the launcher's `failures`.

    A rank that was killed leaves no note, and the others fail because of it; those that the launcher ends afterwards count for
    nothing. Else it is the first error of a rank's own.
    """
    from hwopt.runs.status import read_status

    folder = noted_folder(notes)
    if not failures and folder is not None and read_status(folder)[0] == 0:
        return Ending(0, "")
    found = {rank: ending for rank in failures if (ending := noted_ending(notes, rank)) is not None}
    began = min((failure.timestamp for failure in failures.values()), default=0)
    killer = min((ending for ending in found.values() if ending.kills), key=lambda ending: ending.time, default=None)
    if killer is not None and killer.time <= began + 1:
        return killer
    for rank, failure in failures.items():
        # in whole seconds; the launcher asks with SIGTERM, and kills half a minute later
        if rank not in found and failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM and failure.timestamp <= began + 1:
            return Ending(WorkerDiedError.exit_code, f"error: rank {rank} {cause_of_death(-failure.exitcode)}")
    own = [ending for ending in found.values() if ending.exit_code not in signals.EXIT_CODES.values()]
    if own:
        first = min(own, key=lambda ending: (ending.secondhand or ending.exit_code == WorkerDiedError.exit_code, ending.time))
        if first.secondhand and folder is not None and read_status(folder)[0] == first.exit_code:
            # the rank at fault was ended over its work on the message; the status has as much of it as there was
            return replace(first, message=f"error: {read_status(folder)[1]}")
        return first
    asked = {-signal.SIGTERM, *signals.EXIT_CODES.values()}
    if found and all(failure.exitcode in asked for failure in failures.values()):
        return min(found.values(), key=lambda ending: ending.time)  # a signal to one rank, on which all have broadcast_folder
    codes = ", ".join(f"rank {rank}: {failure.exitcode}" for rank, failure in sorted(failures.items()))
    return Ending(WorkerDiedError.exit_code, f"error: the ranks ended without a word ({codes or 'no exit codes'})")


def cause_of_death(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    if name == "SIGKILL":
        return "was killed (SIGKILL), as the system does when the host runs out of memory: try plugins.dataloader.workers = 0"
    return f"was ended by {name}; what it printed last says more"


def record_outcome(notes: Path, ending: Ending) -> None:
    """`status.json` of the run says how it ended, also where the ranks could not write it."""
    from hwopt.runs.status import status_code, write_status

    folder = noted_folder(notes)
    if folder is not None and folder.is_dir() and status_code(folder) != ending.exit_code:
        with contextlib.suppress(StorageError):
            write_status(folder, ending.exit_code, ending.message.removeprefix("error: "))


def end_what_is_left(notes: Path) -> None:
    """Kill what still runs for this launch, wherever it hangs: the data-loading workers of a killed rank, say."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(NOTES) == str(notes):
                process.kill()


def leave_note(exit_code: int, message: str, secondhand: bool, kills: bool = False) -> bool:
    """In a rank of such a launch: note how it ends. False elsewhere, where a process says it itself."""
    if NOTES not in os.environ:
        return False
    ending = Ending(exit_code, message, secondhand, time.time(), kills)
    try:
        rank, _ = rank_and_world(os.environ)
        (Path(os.environ[NOTES]) / f"rank-{rank}.json").write_text(json.dumps(asdict(ending)), encoding="utf-8")
    except (OSError, InputError):
        return False
    return True


def noted_ending(notes: Path, rank: int) -> Ending | None:
    try:
        return Ending(**json.loads((notes / f"rank-{rank}.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def noted_folder(notes: Path) -> Path | None:
    try:
        return Path((notes / FOLDER_NOTE).read_text(encoding="utf-8"))
    except OSError:
        return None


def broadcast_folder(folder: Path, checkpoint: Path | None, code: int) -> tuple[Path, Path | None, int]:
    """What the first rank has settled: ranks that look at different moments may find something else."""
    rank, world_size = rank_and_world(os.environ)
    if world_size > 1:
        import torch.distributed as dist

        told = [str(folder), str(checkpoint) if checkpoint else None, code]
        dist.broadcast_object_list(told, 0)
        folder, checkpoint, code = Path(str(told[0])), Path(str(told[1])) if told[1] else None, int(told[2] or 0)
    if rank == 0 and NOTES in os.environ and code <= 0:  # below: there is nothing to do in it any more
        (Path(os.environ[NOTES]) / FOLDER_NOTE).write_text(str(folder.absolute()), encoding="utf-8")
    return folder, checkpoint, code
