"""Signals that end a run: acknowledged at once, obeyed after the step, saved before the process ends."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import NoReturn

from hwopt.saving.checkpointer import Checkpointer
from hwopt.system import signals
from hwopt.training.run import Run


def signals_acknowledged(run: Run) -> AbstractContextManager[None]:
    """Within the block a signal is answered with a line on the screen, because the step may take a while."""

    def acknowledge(number: int) -> None:
        if run.world_size == 1:  # launchers send ranks signals of their own, which no user asked for
            signals.announce_stop()

    return signals.deferred(acknowledge)


def signalled(run: Run) -> int:
    """The exit code of a signal that any rank received, or 0. All ranks call it."""
    code: int = run.engine.all_reduce_max(signals.received() or 0)
    return code


def stop(run: Run, code: int, checkpoints: Checkpointer) -> NoReturn:
    """Save the run and end it, because a signal asked for it. All ranks call it, and wait for the one that writes."""
    signals.record_remote_signal(code)
    checkpoints.save()
    checkpoints.writer.wait()
    run.engine.all_reduce_max(0)
    run.say(f"Stopped after step {run.step:,}, saved in {run.folder}. The same command with --resume continues it")
    raise signals.exception_for(code)
