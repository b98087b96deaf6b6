"""How many bytes a checkpoint of a run takes, and whether the disk has room for all that the run will keep."""

from __future__ import annotations

import torch

from hwopt.saving.async_writer import require_space
from hwopt.saving.savable_run import SavableRun
from hwopt.system.atomic_folder import GIB


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
