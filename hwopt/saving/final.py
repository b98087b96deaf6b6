"""`final/`: the trained model, as `from_pretrained` opens it."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwopt.system.atomic_folder import staged

if TYPE_CHECKING:
    from hwopt.saving.async_writer import Writer
    from hwopt.saving.savable_run import SavableRun
from hwopt.saving.model_files import write_model


def save_final(run: SavableRun, writer: Writer) -> Path:
    """Training is over: undo what only training needed (merge adapters, fp32 weights) and write `final/`. All ranks call it."""
    target = run.folder / "final"
    model = run.engine.whole_model()
    for step in reversed(run.recipe.final_steps):
        model = step(model, run)
    if run.is_main:
        writer.submit(partial(write_final, run, model, target))
    writer.wait()  # together: in a barrier the others would give up after some minutes
    return target


def write_final(run: SavableRun, model: Any, target: Path) -> None:
    weights = model.state_dict()
    with staged(target, sum(weight.nbytes for weight in weights.values())) as folder:
        if run.extras.is_dir():
            shutil.copytree(run.extras, folder, dirs_exist_ok=True)
        model.__dict__.pop("forward", None)  # as above; nothing computes with it any more
        write_model(run, model, weights, folder)
    shutil.rmtree(run.extras, ignore_errors=True)
