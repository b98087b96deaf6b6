"""Checkpointer: what goes into a checkpoint. Its content does not depend on the number of ranks or the engine."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hwopt.errors import InputError, StorageError
from hwopt.saving import reader
from hwopt.saving.best_model import BestModel
from hwopt.saving.savable_run import SavableRun, Stateful, named_by_class, restore_parts
from hwopt.saving.save_timing import SaveTiming
from hwopt.saving.writer import AsyncWriter
from hwopt.tensor_tree import HostCopies, map_tensors


class Checkpointer:
    """Saves and restores a run. `parts`: name -> what the loop keeps beside the engine."""

    def __init__(self, run: SavableRun, writer: AsyncWriter, best: BestModel, parts: Mapping[str, Stateful]) -> None:
        self.run, self.writer, self.best = run, writer, best
        self.parts: dict[str, Stateful] = {"best": best, **parts, **named_by_class(run.recipe.state)}
        self.timing = SaveTiming(run, writer)
        best.then = self.prune
        self.saved_step = 0  # the step of the newest checkpoint. Before the first step there is nothing to save.

    def restore(self) -> None:
        """Restore the run from its checkpoint, if it has one. All ranks call it. Raises InputError if it is of another model."""
        checkpoint = self.run.checkpoint
        if checkpoint is None:
            return
        state = checkpoint.state
        try:
            self.run.engine.load_state(state["engine"])
            load_buffers(self.run.inner_model, state["buffers"])
            restore_parts(self.parts, state["ranks"], self.run)
        except ValueError as error:
            raise InputError(
                f"{checkpoint.folder} belongs to another model or optimizer: {error}. Give the job and the profile that wrote "
                "it, or start over with --fresh"
            ) from error
        if checkpoint.folder.parent.absolute() == self.run.folder.absolute():
            self.saved_step = self.run.step
        else:
            self.save()  # else --resume would find no checkpoint in this folder until the next save

    def save(self, all_ranks: bool = True) -> None:
        """Write `checkpoint-<step>/` while training continues, after the previous one is written. All ranks call it.

        Without the other ranks (`all_ranks=False`) only the first rank can save, and only if it holds the whole model.
        """
        run = self.run
        if run.step == self.saved_step:
            return
        self.writer.wait(all_ranks)
        copies = HostCopies(temporary=run.engine.meets_in_micro_batches)
        own = {name: part.state_dict() for name, part in self.parts.items()}
        state = {
            "engine": run.engine.state(copies),
            "buffers": map_tensors(copies, persistent_buffers(run.inner_model)),
            "ranks": run.engine.all_gather(map_tensors(copies, own)) if all_ranks else [own],
        }
        weights = run.state_dict()
        self.saved_step = run.step
        self.timing.saved()
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
            self.writer.write(run.folder / f"checkpoint-{run.step}", content, state, weights, copies, then=self.prune)

    def emergency_save(self, all_ranks: bool) -> None:
        """Save the last complete step of a run that failed, if possible. An error is shown as a warning, not raised."""
        run = self.run
        can_save_alone = run.is_main and not run.engine.meets_in_micro_batches
        if not run.progress.between_steps or not (all_ranks or run.world_size == 1 or can_save_alone):
            return
        try:
            self.save(not run.progress.peers_lost)
            self.writer.wait(not run.progress.peers_lost)
        except (StorageError, RuntimeError) as error:
            run.warn(f"The steps since {self.saved_step} could not be saved: {error}")

    def prune(self, best_is_final: bool = False) -> None:
        """Delete the oldest checkpoints beyond training.save_total_limit, and best weights that no checkpoint refers to."""
        if not self.run.is_main:
            return
        folder, limit = self.run.folder, self.run.training.save_total_limit
        checkpoints = reader.list_checkpoints(folder)
        kept = checkpoints[: limit or None]
        referenced = {reader.read_metadata(path).get("best_step") for path in kept} | (
            set() if best_is_final else {self.best.step}
        )
        unused = [path for step, path in reader.numbered(folder, "best").items() if step not in referenced]
        for path in (*checkpoints[len(kept) :], *unused):
            shutil.rmtree(path, ignore_errors=True)


def persistent_buffers(model: Any) -> dict[str, Tensor]:
    """Name -> buffer that a state dict holds, such as a running mean."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


@torch.no_grad()
def load_buffers(model: Any, saved: Mapping[str, Tensor]) -> None:
    """Copy the `saved` buffers into those of `model` that have the same name."""
    for name, buffer in persistent_buffers(model).items():
        if name in saved:
            buffer.copy_(saved[name])
