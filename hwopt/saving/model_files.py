"""Write a model and its tokenizer in the format that `from_pretrained` opens; `final/` holds the trained one."""

from __future__ import annotations

import copy
import json
import shutil
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hwopt.system.atomic_folder import staged

if TYPE_CHECKING:
    from torch import Tensor

    from hwopt.saving.async_writer import AsyncWriter
    from hwopt.saving.savable_run import SavableRun


HOOKS = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)
PLAN_FILES = ("job.toml", "plan.json")
"""What `hwopt predict` reads of a run beside its model, so that `final/` can be copied elsewhere alone."""


def skeleton_of(model: Any) -> Any:
    """A copy of `model` on the meta device, without hooks and forward wrappers. It can be saved while `model` trains."""
    known: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        known[id(tensor)] = torch.nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else empty
    for module in model.modules():
        known |= {id(hooks): OrderedDict() for name in HOOKS if (hooks := getattr(module, name, None)) is not None}
    skeleton = copy.deepcopy(model, known)
    skeleton.__dict__.pop("forward", None)  # Accelerate's autocast wrapper cannot be saved
    return skeleton


def write_model(run: SavableRun, model: Any, weights: dict[str, Tensor], folder: Path) -> None:
    """Write the config of `model`, `weights` instead of its own weights, and the run's tokenizer to `folder`.

    Of a model without `save_pretrained`, only the state dict and the tokenizer are written.
    """
    run.prepared.tokenizer.save_pretrained(folder)
    if not hasattr(model, "save_pretrained"):
        from safetensors.torch import save_file

        separate = {name: weight.detach().clone().contiguous() for name, weight in weights.items()}  # they may share memory
        save_file(separate, folder / "model.safetensors")
        return
    dtype = str(next(weight for weight in weights.values() if weight.is_floating_point()).dtype).removeprefix("torch.")
    model.save_pretrained(folder, state_dict=weights)
    config = folder / "config.json"
    if config.is_file():  # an adapter has no config.json
        content = json.loads(config.read_text(encoding="utf-8"))
        # transformers writes the dtype of the model in memory (half under O2), and loads the weights in that dtype
        content["dtype"] = dtype
        content["use_cache"] = True  # off only in training; generation needs it
        config.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


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
