"""Handle a failure in training: save the last complete step, and turn out of memory into a message with the option to lower."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from hwopt.config.aliases import option_for
from hwopt.errors import DoesNotFitError, HwoptError, NonFiniteError, WorkerDiedError, worker_death
from hwopt.plugin import RunView
from hwopt.plugin.guard import GuardedOnce
from hwopt.saving.checkpointer import Checkpointer
from hwopt.text import first_line
from hwopt.training.run import Run
from hwopt.training.telemetry.telemetry import Telemetry


@contextmanager
def save_on_failure(run: Run, telemetry: Telemetry, checkpoints: Checkpointer) -> Iterator[None]:
    """If the block fails, save the last complete step and log the rows that are still pending."""
    try:
        yield
    except (NonFiniteError, DoesNotFitError, WorkerDiedError, RuntimeError) as error:
        if not isinstance(error, HwoptError) and worker_death(error) is None:
            raise
        all_ranks = isinstance(error, NonFiniteError)
        run.progress.peers_lost = not all_ranks and run.world_size > 1
        for row in (telemetry.flush(), telemetry.estimated_row() if run.progress.peers_lost else None):
            if row is not None:
                run.listener.on_log(run, row)
        checkpoints.emergency_save(all_ranks)
        telemetry.judge()  # a non-finite loss matters more than the error that followed it
        raise


@contextmanager
def report_oom(what: str, option: str) -> Iterator[None]:
    """Turn an out-of-memory error of the block into a DoesNotFitError that names the `option` to lower."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DoesNotFitError(
            f"{what} does not fit into the device's memory ({first_line(error)}). "
            f"Lower {option}, lower data.max_length, or set {option_for('gradient_checkpointing')}."
        ) from error


def last_resorts(run: RunView) -> list[Callable[[], str | None]]:
    """What plugins can do when not even single rows fit; each call returns what it costs, or None if it cannot help."""
    return [
        GuardedOnce(partial(plugin.on_oom, run), f"plugin {plugin.name!r} ({type(plugin).__module__})", "on_oom()")
        for plugin in run.plan.oom_plugins
    ]
