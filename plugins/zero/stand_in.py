"""What DeepSpeed's ZeRO holds on a device, on tensors that no kernel of it can run on: for the memory planner."""

from __future__ import annotations

from math import ceil
from typing import Any

import torch
from torch import Tensor

from hwopt.engine import Engine

BUCKET = 1 << 24


class StandIn(Engine):
    """Gradients go into this rank's partition as they come; the update steps on flat fp32 masters, a group at a time."""

    def __init__(self, run: Any, *, stage: int, ranks: int, offload_optimizer: bool) -> None:
        super().__init__(run)
        self.stage, self.ranks, self.offload = stage, ranks, offload_optimizer
        precision = run.recipe.accelerator.get("mixed_precision", "no")
        self.half = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision)
        trained = [p for p in run.inner_model.parameters() if p.requires_grad]
        if self.half is not None:
            for parameter in run.inner_model.parameters():
                parameter.data = parameter.data.to(self.half)
        self.groups = [list(group["params"]) for group in run.optimizer.param_groups]
        self.masters = []
        for group in run.optimizer.param_groups:
            size = 0 if offload_optimizer else ceil(sum(p.numel() for p in group["params"]) / ranks)
            group["params"] = [torch.nn.Parameter(torch.zeros(size))]
            self.masters += group["params"]
        self.parameters, self.zeroed = self.masters, [*self.masters, *trained]
        self.kept: dict[Tensor, Tensor] = {}
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(self.keep)

    def keep(self, parameter: Tensor) -> None:
        """This rank's part of a gradient, which is then freed; an offloaded one is on the host already."""
        gradient = parameter.grad
        assert gradient is not None, "called when there is one"
        parameter.grad = None
        if not self.offload and parameter not in self.kept:
            ranks = self.ranks if self.stage >= 2 else 1
            self.kept[parameter] = gradient if ranks == 1 else gradient.flatten()[: ceil(gradient.numel() / ranks)].clone()

    def earlier_gradients(self) -> None:
        """As after a first micro-batch."""
        for parameter in (p for group in self.groups for p in group):
            parameter.grad = torch.zeros_like(parameter)
            self.keep(parameter)

    def backward(self, loss: Tensor, share: float) -> None:
        bucket = torch.empty(min(BUCKET, sum(p.numel() for group in self.groups for p in group)), dtype=self.half)
        super().backward(loss, share)
        del bucket

    def finish(self) -> None:
        for group, master in zip(self.groups, self.masters, strict=True):
            gradients = [self.kept.pop(p) for p in group if p in self.kept]
            if gradients and not self.offload:
                flat = torch.cat([gradient.flatten() for gradient in gradients])[: master.numel()]
                master.grad = flat.to(master.dtype)
                del flat
        for event in self.on_gradients:
            event(self.run)
        self.optimizer.step()
        self.scheduler.step()
        self.drop()
