"""What DeepSpeed's ZeRO holds on a device, on tensors that no kernel of it can run on: for the memory planner."""

from __future__ import annotations

from math import ceil

import torch
from torch import Tensor

from hwopt.distributed.engine import Engine
from hwopt.plugin import RunView


class StandIn(Engine):
    """Gradients go into this rank's partition as they come; the update steps on flat fp32 masters, a group at a time."""

    def __init__(self, run: RunView, *, stage: int, ranks: int, offload: bool, host: bool, bucket: int) -> None:
        """`bucket`: elements that are reduced at once; `host`: what is offloaded counts, for this is a CPU."""
        super().__init__(run)
        self.stage, self.ranks, self.offload, self.bucket_elements = stage, ranks, offload and not host, bucket
        precision = run.recipe.accelerator.get("mixed_precision", "no")
        self.dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision, torch.float32)
        self.groups = [list(group["params"]) for group in run.optimizer.param_groups]
        trained = [p for group in self.groups for p in group]
        for parameter in run.inner_model.parameters():
            parameter.data = parameter.data.to(self.dtype)
        self.flat_masters = [torch.nn.Parameter(self.partition(group, torch.float32)) for group in self.groups]
        for group, master in zip(run.optimizer.param_groups, self.flat_masters, strict=True):
            group["params"] = [master]
        self.parameters, self.zeroed = self.flat_masters, [*self.flat_masters, *trained]
        self.held = self.offload_buffers(trained, offload, host)
        self.kept: dict[Tensor, Tensor] = {}
        self.bucket: Tensor | None = None
        if stage == 3:  # which keeps both from the beginning to the end
            self.bucket = torch.zeros(bucket, dtype=self.dtype)
            self.own_gradients = [self.partition(group, self.dtype) for group in self.groups]
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(self.keep)

    def partition(self, group: list[Tensor], dtype: torch.dtype) -> Tensor:
        """This rank's part of a group, flat; empty where it lies in the host's memory."""
        return torch.zeros(0 if self.offload else ceil(sum(p.numel() for p in group) / self.ranks), dtype=dtype)

    def offload_buffers(self, trained: list[Tensor], offload: bool, host: bool) -> list[Tensor]:
        """The largest gradient on the device; on the host its copy, all gradients in fp32, the weights on their way back."""
        if not offload:
            return []
        largest = max(p.numel() for p in trained)
        on_device = [torch.zeros(largest, dtype=self.dtype)]
        if not host:
            return on_device
        flat = [self.partition(group, dtype) for group in self.groups for dtype in (torch.float32, self.dtype)]
        return [*on_device, torch.zeros(largest, dtype=self.dtype), *flat]

    def keep(self, parameter: Tensor) -> None:
        """This rank's part of a gradient, which is then freed; an offloaded one is on the host already."""
        gradient = parameter.grad
        assert gradient is not None, "called when there is one"
        parameter.grad = None
        if self.bucket is None:
            self.bucket = torch.empty(self.bucket_elements, dtype=self.dtype)
        if self.stage < 3 and not self.offload and parameter not in self.kept:
            ranks = self.ranks if self.stage >= 2 else 1
            self.kept[parameter] = gradient if ranks == 1 else gradient.flatten()[: ceil(gradient.numel() / ranks)].clone()

    def flat_gradients(self, number: int) -> Tensor:
        """This rank's part of those of a group."""
        if self.stage == 3:
            return self.own_gradients[number]
        kept = [self.kept.pop(p).flatten() for p in self.groups[number] if p in self.kept]
        return torch.cat(kept)[: self.flat_masters[number].numel()]

    def earlier_gradients(self) -> None:
        """As after a first micro-batch."""
        for parameter in (p for group in self.groups for p in group):
            parameter.grad = torch.zeros_like(parameter)
            self.keep(parameter)
        self.release_bucket()

    def release_bucket(self) -> None:
        if self.stage == 2:  # stage 1 keeps it until the update
            self.bucket = None

    def backward(self, loss: Tensor, loss_weight: float) -> None:
        super().backward(loss, loss_weight)
        self.release_bucket()

    def finish(self) -> None:
        for number, (group, master) in enumerate(zip(self.groups, self.flat_masters, strict=True)):
            for parameter in (p for p in group if p.grad is not None):
                self.keep(parameter)
            if self.stage < 3:
                self.bucket = None
            if not self.offload:
                master.grad = self.flat_gradients(number).to(master.dtype)
        for event in self.on_gradients:  # the planner labels gradients there
            event(self.run)
        self.optimizer.step()
        self.scheduler.step()
        self.zero_grad()
