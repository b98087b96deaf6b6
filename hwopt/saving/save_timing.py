"""When a checkpoint is due: every `save_steps` steps, every `save_minutes` minutes, and at a signal; and its size in bytes."""

from __future__ import annotations

import time

import torch

from hwopt.hardware.detect import host_memory
from hwopt.saving.savable_run import SavableRun
from hwopt.saving.writer import AsyncWriter, require_space
from hwopt.system import signals
from hwopt.system.atomic_folder import GIB

SAVE = 1  # the requested action "save"; the exit codes of signals are greater
HOST_SHARE = 0.9  # the part of the free host memory that the copy for a timed checkpoint may take


class SaveTiming:
    """Decides after each step whether to save. Only the first rank reads the clock; every rank receives signals."""

    def __init__(self, run: SavableRun, writer: AsyncWriter) -> None:
        self.run, self.writer = run, writer
        self.saved_at = time.monotonic()
        self.said_room = False

    def saved(self) -> None:
        """A checkpoint of this step is being written: restart the clock."""
        self.saved_at = time.monotonic()

    def at_end(self) -> bool:
        """Whether to save the last step, so that the run can be extended. The first rank decides for all."""
        training = self.run.training
        wanted = self.run.is_main and (training.save_steps is not None or training.save_minutes > 0) and self.fits_host_memory()
        return bool(self.run.engine.all_reduce_max(int(wanted)))

    def requested_action(self) -> int:
        """What this rank asks for after a step: 0, SAVE, or the exit code of a signal that it received."""
        if code := signals.received():
            return code
        if not self.run.is_main:
            return 0
        self.writer.check()
        return SAVE if self.timed_save_due() and self.fits_host_memory() else 0

    def timed_save_due(self) -> bool:
        """Whether the next checkpoint by the clock is due.

        It is early by the duration of a write, at most half the interval, so that a killed run loses no more than the interval.
        """
        interval = 60 * self.run.training.save_minutes
        return interval > 0 and time.monotonic() - self.saved_at >= interval - min(self.writer.seconds, interval / 2)

    def fits_host_memory(self) -> bool:
        """Whether host memory has room for the copy of a timed checkpoint; checkpoints by steps and signals are always tried."""
        needed, free = sum(state_size(self.run)), host_memory()[1]
        if needed <= HOST_SHARE * free:
            return True
        self.saved()
        if not self.said_room:
            self.said_room = True
            self.run.warn(
                f"Skipping timed checkpoint: needs {needed / GIB:.2f} GiB of host memory, {free / GIB:.2f} GiB free. "
                "Set training.save_steps to save anyway."
            )
        return False

    def due(self, ahead: int = 0) -> bool:
        """Whether training.save_steps asks for a checkpoint after this step, or after the step that is `ahead` steps later."""
        steps = self.run.training.save_steps
        return steps is not None and (self.run.step + ahead) % steps == 0


def state_size(run: SavableRun) -> tuple[int, int]:
    """(bytes of a saved model, bytes of the training state beside it)."""
    adapter = hasattr(run.skeleton, "peft_config")
    trained = [p for p in run.skeleton.parameters() if p.requires_grad]
    model = sum(4 * p.numel() for p in (trained if adapter else run.skeleton.parameters()))
    state = sum(
        value.numel() * value.element_size()
        for values in run.optimizer.state.values()
        for value in values.values()
        if isinstance(value, torch.Tensor)
    )
    # without a state yet, or with a sharded one: 8 bytes a trained element, as for Adam
    return model, max(state, 0 if state and run.world_size == 1 else sum(8 * p.numel() for p in trained))


def require_space_for_run(run: SavableRun) -> None:
    """Raise StorageError if the disk has not enough free space for the run's checkpoints and `final/`. First rank only."""
    if not run.is_main:
        return
    training = run.training
    model, state = state_size(run)
    saves = run.total_steps // training.save_steps if training.save_steps else (1 if training.save_minutes else 0)
    kept = min(saves, (training.save_total_limit or saves) + 1)
    best = 2 * model if run.eval_loader is not None else 0
    final = sum(4 * p.numel() for p in run.skeleton.parameters())  # the merged model, also if only an adapter is trained
    present = sum(path.stat().st_size for path in run.folder.rglob("*") if path.is_file())
    what = f"the run, with {kept} checkpoint(s) of {(model + state) / GIB:.3f} GiB,"
    require_space(run.folder, max(0, kept * (model + state) + best + final - present), what)
