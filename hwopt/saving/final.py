"""`final/`: the trained model, as `from_pretrained` opens it."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

from hwopt.saving.async_writer import AsyncWriter
from hwopt.saving.model_files import write_model
from hwopt.saving.savable_run import SavableRun
from hwopt.system.atomic_folder import staged

PLAN_FILES = ("job.toml", "plan.json")
"""What `hwopt predict` reads of a run beside its model, so that `final/` can be copied elsewhere alone."""


def save_final(run: SavableRun, writer: AsyncWriter, card: str) -> Path:
    """Write `final/` and return its path, after the recipe's `final_steps` (merge adapters, fp32 weights). All ranks call it.

    `card`: the text of its README.md.
    """
    target = run.folder / "final"
    model = run.engine.unsharded_model()
    for step in reversed(run.recipe.final_steps):
        model = step(model, run)
    if run.is_main:
        writer.submit(partial(write_final, run, model, target, card))
    writer.wait()  # all ranks wait here: a barrier would time out after some minutes
    return target


def write_final(run: SavableRun, model: Any, target: Path, card: str) -> None:
    weights = model.state_dict()
    with staged(target, sum(weight.nbytes for weight in weights.values())) as folder:
        if run.extras.is_dir():
            shutil.copytree(run.extras, folder, dirs_exist_ok=True)
        model.__dict__.pop("forward", None)  # Accelerate's autocast wrapper cannot be saved
        write_model(run, model, weights, folder)
        (folder / "README.md").write_text(card, encoding="utf-8", errors="replace")
        for name in PLAN_FILES:
            if (run.folder / name).is_file():  # a run by the Python API has none
                shutil.copy(run.folder / name, folder)
    shutil.rmtree(run.extras, ignore_errors=True)
