"""Both passes of a micro-batch by a Trainer's own training_step, for plugins that wrap those of hwopt's loop."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor

from hwopt.distributed.forward_backward import ForwardBackward
from hwopt.hosts.collated import CollatedPart
from hwopt.hosts.script_run import ScriptRun

COUNT = "num_items_in_batch"


class TrainerPasses(ForwardBackward):
    """`begin` names the step; each call then computes one of its micro-batches."""

    def __init__(self, trainer: Any, run: ScriptRun) -> None:
        super().__init__(run)
        self.trainer = trainer
        self.weight: float | Tensor = 1.0
        """What the Trainer's loss of the present micro-batch is multiplied by."""
        self.on_device = torch.ones((), device=run.device)
        """The weight, for passes that are recorded."""

    def begin(self, model: Any, training_step: Callable[[Any, Any], Tensor], count: Any) -> None:
        """`training_step(inputs, count)` is the Trainer's; `count`: the labels of the step, or None."""
        self.model, self.training_step, self.count = model, training_step, count

    def __call__(self, micro_batch: CollatedPart, first: bool, last: bool, mark_time: Callable[[str], None]) -> Tensor:
        with nullcontext() if last else self.trainer.accelerator.no_sync(model=self.model):
            return self.weighted(micro_batch.weight, sent(micro_batch.inputs, self.run.device), self.count)

    def tensors(self, micro_batch: Any) -> dict[str, Tensor]:
        found = sent(micro_batch.inputs, self.run.device)
        first = {name: found[name] for name in ("input_ids",) if name in found}  # its shape is that of the micro-batch
        return first | found | ({COUNT: self.count} if isinstance(self.count, Tensor) else {})

    def constants(self) -> Hashable:
        return int(self.trainer.current_gradient_accumulation_steps)

    def set_weight(self, micro_batch: Any) -> None:
        self.on_device.fill_(micro_batch.weight)

    def compute(self, tensors: dict[str, Tensor]) -> Tensor:
        return self.weighted(self.on_device, {name: tensors[name] for name in tensors if name != COUNT}, tensors.get(COUNT))

    def weighted(self, weight: float | Tensor, inputs: Any, count: Any) -> Tensor:
        """The detached loss of `inputs`; its gradients, times `weight`, are accumulated."""
        self.weight = weight
        try:
            return self.training_step(inputs, count)
        finally:
            self.weight = 1.0


def sent(inputs: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """`inputs` on `device`, by copies that do not wait for a GPU: those from pinned memory."""
    if device.type != "cuda":
        return dict(inputs)
    pinned = {key: value.pin_memory() if isinstance(value, Tensor) else value for key, value in inputs.items()}
    return dict(send_to_device(pinned, device, non_blocking=True))
