"""Claim the run folder, choose the checkpoint that the run resumes from, and refuse that of another run."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hwopt.config.aliases import option_for
from hwopt.distributed.data_parallel import error_of_rank
from hwopt.errors import FolderInUseError, HwoptError, InputError, StorageError
from hwopt.records.run_files import FINAL, SUMMARY, completed_steps, read_object
from hwopt.runs.folder import lock_run_folder
from hwopt.runs.launch import broadcast_folder
from hwopt.saving.reader import Checkpoint, copy_best, latest_valid, list_checkpoints, load_checkpoint
from hwopt.text import truncate
from hwopt.training.run import Run


class AlreadyComplete(Exception):
    """The run that should resume is complete."""

    exit_code = -1

    def __init__(self, run: Run) -> None:
        self.run = run


def claim_run_folder(
    run: Run, stack: contextlib.ExitStack, *, resume: bool | Path, fresh: bool, next_folder: Callable[[], Path] | None = None
) -> None:
    """Set run.folder, run.checkpoint and run.progress, the same on all ranks.

    The first rank locks the folder until `stack` closes, and chooses the checkpoint. What it raises, all ranks raise. If another
    process took the folder meanwhile, `next_folder` returns another one; None: the folder was asked for by name.
    """
    found: Checkpoint | None = None
    error: HwoptError | AlreadyComplete | None = None
    if run.is_main:
        try:
            lock(run, stack, resume is not False, fresh, next_folder)
            found = select_checkpoint(run, resume)
            if found is not None and found.folder.parent.absolute() != run.folder.absolute():
                copy_best(found, run.folder)
        except (HwoptError, AlreadyComplete) as refused:
            error = refused
    code = 0 if error is None else error.exit_code
    folder, path, code = broadcast_folder(run.folder, found.folder if found else None, code)
    if error is not None:
        raise error
    if code == AlreadyComplete.exit_code:
        raise AlreadyComplete(run)
    if code:
        raise error_of_rank(code, 0)
    if path is not None:
        run.checkpoint = found or load_checkpoint(path, verify=False)
        run.progress.step = run.checkpoint.step
    run.folder = folder


def lock(run: Run, stack: contextlib.ExitStack, resume: bool, fresh: bool, next_folder: Callable[[], Path] | None) -> None:
    """Lock run.folder until `stack` closes, or the first of `next_folder` that no other process took."""
    while True:
        try:
            stack.enter_context(lock_run_folder(run.folder, resume=resume, fresh=fresh))
            return
        except (FolderInUseError, InputError):
            if next_folder is None:
                raise
            run.folder = next_folder()


def select_checkpoint(run: Run, resume: bool | Path) -> Checkpoint | None:
    """The checkpoint that `run` resumes from, or None for a new run. Raises InputError if it belongs to another run."""
    if resume is False:
        return None
    found = newest_or_asked_for(run, resume)
    if found is not None:
        refuse_another_run(found, run.facts)
    done = completed_steps(run.folder) if (run.folder / FINAL).is_dir() else 0
    patience = run.training.early_stopping_patience
    stops = patience is not None and int(read_object(run.folder / SUMMARY).get("early_stopping_count", 0)) >= patience
    if done and (found is None or resume is True) and (done >= run.total_steps or stops):
        raise AlreadyComplete(run)
    if done and found is None:
        raise InputError(
            f"{run.folder} is complete after {done:,} steps and has no checkpoint to resume from, to train to step "
            f"{run.total_steps:,}. Start over with --fresh, which keeps the old folder, or give another --name"
        )
    if found is None:
        run.say(f"{run.folder} has no checkpoint: starting from step 1")
        return None
    if found.step > run.total_steps:
        raise InputError(
            f"{found.folder} is of step {found.step:,}, but the job has only {run.total_steps:,} steps: raise "
            "training.max_steps or training.num_train_epochs"
        )
    if changes := changed_since(found, run.plan.settings):
        run.warn(f"Settings changed since the run started: {'; '.join(changes)}")
    if done > found.step:
        run.warn(f"The run had reached step {done:,}; its newest checkpoint is of step {found.step:,}. Repeating the steps since")
    run.say(f"Resuming from step {found.step:,} of {run.total_steps:,} ({found.folder})")
    return found


def newest_or_asked_for(run: Run, resume: bool | Path) -> Checkpoint | None:
    """The newest valid checkpoint of the run folder, or the one that --resume-from names."""
    if not isinstance(resume, Path):
        return latest_valid(run.folder, run.warn)
    try:
        found = load_checkpoint(resume)
    except StorageError as error:
        raise StorageError(f"--resume-from: {error}. --resume takes the newest valid checkpoint of a run") from error
    own = list_checkpoints(run.folder)
    if resume.parent.absolute() == run.folder.absolute() and own[0].name != resume.name:
        raise InputError(
            f"--resume-from {resume}: {run.folder} has a newer checkpoint, {own[0].name}, which this run would contradict. "
            "Give another --name to continue from here in a new folder, or --resume for the newest checkpoint"
        )
    return found


def changed_since(checkpoint: Checkpoint, settings: Mapping[str, Any]) -> list[str]:
    """The settings that changed since the checkpoint, which is allowed: "training.max_steps was 100 and is 200"."""
    before = checkpoint.content["settings"]
    changed = [
        f"{key} was {truncate(before[key])} and is {truncate(value)}"
        for key, value in settings.items()
        if key in before and before[key] != value
    ]
    now, then = ({".".join(key.split(".")[:2]) for key in each if key.startswith("plugins.")} for each in (settings, before))
    changed += [f"{name} is new" for name in sorted(now - then)]
    return changed + [f"{name} was removed" for name in sorted(then - now)]


def refuse_another_run(checkpoint: Checkpoint, facts: Mapping[str, Any]) -> None:
    """Raise InputError if `checkpoint` belongs to another run, one with other data, steps or weights."""
    before = checkpoint.content["facts"]
    advice = {
        "rows a step": f"Keep the effective batch: --set {option_for('effective_batch_size')}={{0}}",
        "samples": "The data or data.max_length changed. Give the same, or start over with --fresh",
        "mixture": "Keep the sources and weights of data.train, or start over with --fresh",
        "seed": "Keep the seed: --set training.seed={0}",
        "order": "Keep the plugin that orders the samples",
        "task": "Keep task.kind",
    }
    for key, hint in advice.items():
        if before.get(key) != facts.get(key):
            raise InputError(
                f"{checkpoint.folder}: {key} was {before.get(key)} and is now {facts.get(key)}. "
                f"The run would not continue the same steps. {hint.format(before.get(key))}"
            )
    now, then = facts["method"], before["method"]
    for key in sorted(now.keys() | then.keys()):
        if now.get(key) != then.get(key):
            raise InputError(
                f"{checkpoint.folder}: {key} was {truncate(then.get(key))} and is now {truncate(now.get(key))}. "
                f"Changing {key} changes the model or the training. Keep it, or start over with --fresh"
            )
    frozen = before["frozen"], facts["frozen"]
    equal = (math.isclose(*pair, rel_tol=0.01, abs_tol=1e-6) for pair in zip(*frozen, strict=False))  # up to half precision
    if len(frozen[0]) == len(frozen[1]) and not all(equal):
        raise InputError(
            f"{checkpoint.folder}: the frozen weights of model.name changed since the checkpoint. "
            "Give the same model folder, or set model.revision to the revision used before"
        )
