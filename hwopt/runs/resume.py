"""Choose the checkpoint that a run resumes from."""

from __future__ import annotations

import contextlib
from pathlib import Path

from hwopt.distributed.data_parallel import ended_with
from hwopt.errors import (
    HwoptError,
    InputError,
    StorageError,
)
from hwopt.runs.folder import owned
from hwopt.runs.launch import broadcast_folder
from hwopt.runs.status import steps_done
from hwopt.saving.compatibility import changed_since, refuse_another_run
from hwopt.saving.reader import Checkpoint, bring_best, in_folder, latest_valid, load_checkpoint
from hwopt.training.run import Run


class Complete(Exception):
    """There is nothing to go on with."""

    exit_code = -1

    def __init__(self, run: Run) -> None:
        self.run = run


def claim_run_folder(run: Run, stack: contextlib.ExitStack, *, resume: bool | Path, fresh: bool) -> None:
    """The first rank makes the folder its own, for as long as `stack` lasts, and finds where the run goes on; all ranks hear.

    Sets run.folder, run.checkpoint and run.step. Raises what the first rank raises, on all of them.
    """
    found: Checkpoint | None = None
    error: HwoptError | Complete | None = None
    if run.is_main:
        try:
            stack.enter_context(owned(run.folder, resume=resume is not False, fresh=fresh))
            found = select_checkpoint(run, resume)
            if found is not None and found.folder.parent.absolute() != run.folder.absolute():
                bring_best(found, run.folder)
        except (HwoptError, Complete) as refused:
            error = refused
    code = 0 if error is None else error.exit_code
    folder, path, code = broadcast_folder(run.folder, found.folder if found else None, code)
    if error is not None:
        raise error
    if code == Complete.exit_code:
        raise Complete(run)
    if code:
        raise ended_with(code, 0)
    if path is not None:
        run.checkpoint = found or load_checkpoint(path, verify=False)
        run.step = run.checkpoint.step
    run.folder = folder


def select_checkpoint(run: Run, resume: bool | Path) -> Checkpoint | None:
    """The checkpoint from which `run` goes on, of the same samples and steps; None: from the start."""
    if resume is False:
        return None
    own = in_folder(run.folder)
    if isinstance(resume, Path):
        found: Checkpoint | None = asked_for(resume)
        if resume.parent.absolute() == run.folder.absolute() and own[0].name != resume.name:
            raise InputError(
                f"--resume-from {resume}: {run.folder} has a newer checkpoint, {own[0].name}, which a run from here would "
                "contradict. Give another --name, and the run goes on there; or --resume for the newest"
            )
    else:
        found = latest_valid(run.folder, run.warn)
    if found is not None:
        refuse_another_run(found, run.facts)
    done = steps_done(run.folder) if (run.folder / "final").is_dir() else 0
    complete = done > 0
    if complete and (found is None or resume is True) and done >= run.total_steps:
        raise Complete(run)
    if complete and found is None:
        raise InputError(
            f"{run.folder} is complete after {done:,} steps, and has no checkpoint to go on from to "
            f"{run.total_steps:,}; begin anew with --fresh, which keeps it, or give another --name"
        )
    if found is None:
        run.say(f"there is no checkpoint in {run.folder}: the run begins at its start")
        return None
    if found.step > run.total_steps:
        raise InputError(
            f"{found.folder} is of step {found.step:,}, and the job has {run.total_steps:,} steps only: raise "
            "training.max_steps or training.num_train_epochs"
        )
    if changes := changed_since(found, run.plan.settings):
        run.warn(f"not as the run was begun: {'; '.join(changes)}")
    if done > found.step:
        between = f"its newest checkpoint is of step {found.step:,}"
        run.warn(f"the run had reached step {done:,}, {between}: the steps since then are made again")
    run.say(f"going on after step {found.step:,} of {run.total_steps:,}, from {found.folder}")
    return found


def asked_for(path: Path) -> Checkpoint:
    try:
        return load_checkpoint(path)
    except StorageError as error:
        raise StorageError(f"--resume-from: {error}. The newest whole one of a run: --resume") from error
