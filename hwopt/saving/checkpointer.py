"""Checkpoints: when they are due, and what goes into them. What they hold does not depend on the number of ranks."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from hwopt.errors import InputError, StorageError
from hwopt.hardware.detect import host_memory
from hwopt.saving import reader as resume
from hwopt.saving.async_writer import require_space
from hwopt.saving.tensor_tree import HostCopies, map_tensors
from hwopt.system import signals
from hwopt.system.atomic_folder import GIB

if TYPE_CHECKING:
    from torch import Tensor

    from hwopt.saving.async_writer import Writer
    from hwopt.saving.best_model import BestWeights
    from hwopt.saving.savable_run import SavableRun


SAVE = 1
"""A requested_action; the exit codes of signals are above it."""
ROOM = 0.9
"""Of the host's free memory, what the copy of a checkpoint may take."""


class Checkpoints:
    """The checkpoints of a run. `parts` are what the loop keeps beside the engine: state_dict(), load_state_dict(state)."""

    def __init__(self, run: SavableRun, writer: Writer, best: BestWeights, parts: Mapping[str, Any]) -> None:
        self.run, self.writer, self.best = run, writer, best
        self.parts = {"best": best, **parts, **named_by_kind(run.recipe.state)}
        best.then = self.prune
        self.saved_step = 0
        """The last step of which there is a checkpoint; there is nothing to save before the first."""
        self.saved_at = time.monotonic()
        self.said_room = False

    def resume(self) -> None:
        """Go on from the run's checkpoint, where it has one. All ranks call it. Raises InputError where it is another run's."""
        checkpoint = self.run.checkpoint
        if checkpoint is None:
            return
        state = checkpoint.state
        try:
            self.run.engine.load_state(state["engine"])
        except ValueError as error:
            raise InputError(
                f"{checkpoint.folder} belongs to another model or optimizer: {error}. Give the job and the profile that it was "
                "made with, or begin anew with --fresh"
            ) from error
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:
            raise unreadable(checkpoint, error) from error
        try:
            load_buffers(self.run.inner_model, state["buffers"])
            ranks = state["ranks"]
            own = ranks[self.run.rank] if len(ranks) == self.run.world_size else ranks[0]
            for name, part in self.parts.items():
                if name in own:
                    part.load_state_dict(own[name])
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise unreadable(checkpoint, error) from error
        if checkpoint.folder.parent.absolute() == self.run.folder.absolute():
            self.saved_step = self.run.step
        else:
            self.save()  # or --resume would find nothing here until the first one is due

    def requested_action(self) -> int:
        """What this rank wants after a step: 0, SAVE, or the exit code of a signal that came."""
        if code := signals.received():
            return code
        if not self.run.is_main:
            return 0
        self.writer.check()
        return SAVE if self.timed_save_due() and self.fits_host_memory() else 0

    def timed_save_due(self) -> bool:
        """Early by what a write takes, up to half of the interval: a run that is killed loses no more than that."""
        interval = 60 * self.run.training.save_minutes
        return interval > 0 and time.monotonic() - self.saved_at >= interval - min(self.writer.seconds, interval / 2)

    def fits_host_memory(self) -> bool:
        """Whether the host's memory takes the copy that is written: nobody has asked for what the clock does."""
        needed, free = sum(sizes(self.run)), host_memory()[1]
        if needed <= ROOM * free:
            return True
        self.saved_at = time.monotonic()
        if not self.said_room:
            self.said_room = True
            self.run.warn(
                f"a checkpoint takes {needed / GIB:.2f} GiB of the host's memory while it is written, and {free / GIB:.2f} are "
                "free: none is written by the clock (training.save_minutes) while that is so; training.save_steps does"
            )
        return False

    def due(self, ahead: int = 0) -> bool:
        """Whether this step, or one so many `ahead`, is one of training.save_steps."""
        steps = self.run.training.save_steps
        return steps is not None and (self.run.step + ahead) % steps == 0

    def save(self, all_ranks: bool = True) -> None:
        """`checkpoint-<step>/`, written beside what comes next, once the one before is. All ranks call it, between two steps.

        Without the others only the first rank can, where each rank holds the whole model.
        """
        run = self.run
        if run.step == self.saved_step:
            return
        self.writer.wait(all_ranks)
        kept = HostCopies(passing=run.engine.meets_in_micro_batches)
        own = {name: part.state_dict() for name, part in self.parts.items()}
        state = {
            "engine": run.engine.state(kept),
            "buffers": map_tensors(kept, persistent_buffers(run.inner_model)),
            "ranks": run.engine.all_gather(map_tensors(kept, own)) if all_ranks else [own],
        }
        weights = run.state_dict()
        self.saved_step, self.saved_at = run.step, time.monotonic()
        if run.is_main:
            content = {
                "step": run.step,
                "facts": run.facts,
                "settings": run.plan.settings,
                "machine": run.plan.machine,
                "decided": run.plan.decided(),
                "best_step": self.best.step,
                "evaluated": self.best.evaluated,
            }
            self.writer.begin(resume.checkpoint_folder(run.folder, run.step), content, state, weights, kept, then=self.prune)

    def emergency_save(self, all_ranks: bool) -> None:
        """The last whole step of a run that cannot go on; never hides why."""
        run = self.run
        if not run.between_steps or not (
            all_ranks or run.world_size == 1 or (run.is_main and not run.engine.meets_in_micro_batches)
        ):
            return
        try:
            self.save(not run.peers_lost)
            self.writer.wait(not run.peers_lost)
        except (StorageError, RuntimeError) as error:
            run.warn(f"what was learnt since step {self.saved_step} could not be saved: {error}")

    def prune(self, best_is_final: bool = False) -> None:
        """The oldest beyond training.save_total_limit go, and best weights that no checkpoint speaks of any more."""
        if not self.run.is_main:
            return
        folder, limit = self.run.folder, self.run.training.save_total_limit
        checkpoints = resume.in_folder(folder)
        for old in checkpoints[limit:] if limit else []:
            shutil.rmtree(old, ignore_errors=True)
        spoken_of = {str(resume.read_metadata(path).get("best_step")) for path in resume.in_folder(folder)}
        if not best_is_final:
            spoken_of.add(str(self.best.step))
        for step, path in resume.best_folders(folder).items():
            if str(step) not in spoken_of:
                shutil.rmtree(path, ignore_errors=True)

    def require_space(self) -> None:
        """Raise StorageError where the disk has no room for what the run will keep. Only the first rank asks."""
        run, training = self.run, self.run.training
        if run.is_main:
            model, state = sizes(run)
            saves = run.total_steps // training.save_steps if training.save_steps else (1 if training.save_minutes else 0)
            kept = min(saves, (training.save_total_limit or saves) + 1)
            best = 2 * model if run.eval_loader is not None else 0
            final = sum(4 * p.numel() for p in run.skeleton.parameters())  # whole, also where an adapter is trained
            there = sum(path.stat().st_size for path in run.folder.rglob("*") if path.is_file())
            what = f"the run, with {kept} checkpoint(s) of {(model + state) / GIB:.3f} GiB"
            require_space(run.folder, max(0, kept * (model + state) + best + final - there), what)


def named_by_kind(parts: Iterable[Any]) -> dict[str, Any]:
    """What plugins keep, by names that other plugins in the profile do not change."""
    found: dict[str, Any] = {}
    for part in parts:
        kind = f"plugins/{type(part).__module__}.{type(part).__qualname__}"
        found[f"{kind}/{sum(name.startswith(f'{kind}/') for name in found)}"] = part
    return found


def unreadable(checkpoint: resume.Checkpoint, error: Exception) -> StorageError:
    return StorageError(
        f"{checkpoint.folder}: its training state is not what hwopt writes ({type(error).__name__}: {error}). "
        "Go on from another one with --resume-from, or begin anew with --fresh"
    )


def sizes(run: SavableRun) -> tuple[int, int]:
    """Bytes of a saved model, and of the training state beside it."""
    adapter = hasattr(run.skeleton, "peft_config")
    trained = [p for p in run.skeleton.parameters() if p.requires_grad]
    model = sum(4 * p.numel() for p in (trained if adapter else run.skeleton.parameters()))
    made = sum(
        value.numel() * value.element_size()
        for values in run.optimizer.state.values()
        for value in values.values()
        if isinstance(value, torch.Tensor)
    )
    return model, max(made, 0 if made and run.world_size == 1 else sum(8 * p.numel() for p in trained))


def persistent_buffers(model: Any) -> dict[str, Tensor]:
    """Those that a state dict has: running means and the like."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


@torch.no_grad()
def load_buffers(model: Any, saved: Mapping[str, Tensor]) -> None:
    for name, buffer in persistent_buffers(model).items():
        if name in saved:
            buffer.copy_(saved[name])
