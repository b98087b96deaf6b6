"""Write a model and its tokenizer in the format that `from_pretrained` opens."""

from __future__ import annotations

import copy
import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hwopt.saving.savable_run import SavableRun

HOOKS = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)


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
    """Write config, `weights` and the run's tokenizer to `folder`; of a model without `save_pretrained` no config."""
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
