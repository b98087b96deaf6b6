"""ZeroStandIn: allocates the same memory on a device as DeepSpeed's ZeRO, which cannot run on the planner's fake tensors."""

from __future__ import annotations

from math import ceil

import torch
from torch import Tensor

from hwopt.distributed.engine import Engine
from hwopt.plugin import RunView


class ZeroStandIn(Engine):
    """Backward copies each gradient into this rank's partition. The optimizer updates flat fp32 masters, group by group."""

    def __init__(self, run: RunView, *, stage: int, ranks: int, offload: bool, host: bool, bucket: int) -> None:
        """`bucket`: elements that are reduced at once. `host`: the device is a CPU, so offloaded tensors count too."""
        super().__init__(run)
        self.stage, self.ranks, self.offload, self.bucket_elements = stage, ranks, offload and not host, bucket
        precision = run.recipe.accelerator.get("mixed_precision", "no")
        self.dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision, torch.float32)
        self.groups = [list(group["params"]) for group in run.optimizer.param_groups]
        trained = [p for group in self.groups for p in group]
        self.partition_elements = ceil(sum(p.numel() for p in trained) / ranks)
        for parameter in run.inner_model.parameters():
            parameter.data = parameter.data.to(self.dtype)
        self.flat_masters = [torch.nn.Parameter(self.partition(group, torch.float32)) for group in self.groups]
        for group, master in zip(run.optimizer.param_groups, self.flat_masters, strict=True):
            group["params"] = [master]
        self.parameters, self.zeroed = self.flat_masters, [*self.flat_masters, *trained]
        self.buffers = self.offload_buffers(trained, offload, host)
        self.gradient_parts: dict[Tensor, Tensor] = {}
        """Parameter -> this rank's part of its gradient."""
        self.unreduced: list[tuple[int, Tensor | None]] = []
        """(elements of this rank's part, gradient if it is larger than the bucket) of each gradient that is not reduced yet."""
        self.bucket: Tensor | None = None
        if stage == 3:  # stage 3 allocates both once
            self.bucket = torch.zeros(bucket, dtype=self.dtype)
            self.own_gradients = [self.partition(group, self.dtype) for group in self.groups]
            self.buffers += [self.bucket, *self.own_gradients]
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(self.store_gradient)

    def partition(self, group: list[Tensor], dtype: torch.dtype) -> Tensor:
        """A flat tensor of the size of this rank's part of `group`; empty if it is offloaded to the host."""
        return torch.zeros(0 if self.offload else ceil(sum(p.numel() for p in group) / self.ranks), dtype=dtype)

    def offload_buffers(self, trained: list[Tensor], offload: bool, host: bool) -> list[Tensor]:
        """The buffers of offloading: the largest gradient on the device; on the host its copy, fp32 gradients and new weights."""
        if not offload:
            return []
        largest = max(p.numel() for p in trained)
        on_device = [torch.zeros(largest, dtype=self.dtype)]
        if not host:
            return on_device
        flat = [self.partition(group, dtype) for group in self.groups for dtype in (torch.float32, self.dtype)]
        return [*on_device, torch.zeros(largest, dtype=self.dtype), *flat]

    def store_gradient(self, parameter: Tensor) -> None:
        """Keep this rank's part of the gradient of `parameter` and free the gradient. Offloaded parts are not counted here."""
        gradient = parameter.grad
        assert gradient is not None, "the hook runs after the gradient is accumulated"
        if self.bucket is None:
            self.bucket = torch.empty(self.bucket_elements, dtype=self.dtype)
        if self.stage < 3 and self.offload:
            self.wait_for_reduction(gradient)
        parameter.grad = None
        if self.stage < 3 and not self.offload and parameter not in self.gradient_parts:
            ranks = self.ranks if self.stage >= 2 else 1
            self.gradient_parts[parameter] = (
                gradient if ranks == 1 else gradient.flatten()[: ceil(gradient.numel() / ranks)].clone()
            )

    def wait_for_reduction(self, gradient: Tensor) -> None:
        """Put `gradient` in the bucket. A bucket that has no room for it is reduced first."""
        if sum(elements for elements, _ in self.unreduced) + gradient.numel() > self.bucket_elements:
            self.reduce_bucket()
        large = gradient if gradient.numel() > self.bucket_elements else None
        self.unreduced.append((min(gradient.numel(), self.partition_elements), large))

    def reduce_bucket(self) -> None:
        """Compute the norm of each gradient of the bucket, in float64: a copy of 8 bytes an element."""
        for elements, _ in self.unreduced:
            torch.empty(elements, dtype=torch.float64)
        self.unreduced.clear()

    def flat_gradients(self, number: int) -> Tensor:
        """This rank's part of the gradients of group `number`, flat and in fp32. DeepSpeed frees what it copies afterwards."""
        if self.stage == 3:
            return self.own_gradients[number].clone().float()
        parts = [self.gradient_parts.pop(p) for p in self.groups[number] if p in self.gradient_parts]
        flat = torch.cat([part.flatten() for part in parts])[: self.flat_masters[number].numel()]
        return flat.float()

    def earlier_gradients(self) -> None:
        """Allocate the gradients as they are after a first micro-batch."""
        for parameter in (p for group in self.groups for p in group):
            parameter.grad = torch.zeros_like(parameter)
            self.store_gradient(parameter)
        self.unreduced.clear()
        self.release_bucket()

    def release_bucket(self) -> None:
        """Free the bucket after a micro-batch, as stage 2 does."""
        if self.stage == 2:  # stage 1 frees it at the update
            self.bucket = None

    def backward(self, loss: Tensor, loss_weight: float, last: bool = True) -> None:
        super().backward(loss, loss_weight, last)
        self.reduce_bucket()
        self.release_bucket()

    def update(self) -> None:
        for number, (group, master) in enumerate(zip(self.groups, self.flat_masters, strict=True)):
            for parameter in (p for p in group if p.grad is not None):
                self.store_gradient(parameter)
            self.unreduced.clear()
            if self.stage < 3:
                self.bucket = None
            if not self.offload:
                master.grad = self.flat_gradients(number)
        for event in self.on_gradients:  # the memory planner labels gradients in this event
            event(self.run)
        self.optimizer.step()
        self.scheduler.step()
        self.zero_grad()
