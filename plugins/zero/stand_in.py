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
        self.trained_elements = elements_of(trained)
        for parameter in run.inner_model.parameters():
            parameter.data = parameter.data.to(self.dtype)
        self.flat_masters = [torch.nn.Parameter(self.part(elements_of(group), torch.float32)) for group in self.groups]
        for group, master in zip(run.optimizer.param_groups, self.flat_masters, strict=True):
            group["params"] = [master]
        self.parameters, self.zeroed = self.flat_masters, [*self.flat_masters, *trained]
        self.buffers = self.offload_buffers(trained, offload, host)
        self.unreduced: list[tuple[int, Tensor | None]] = []
        """(elements of this rank's part, gradient if it is larger than the bucket) of each gradient that is not reduced yet."""
        self.bucket: Tensor | None = None
        self.own_gradients: Tensor | None = None
        """This rank's part of all gradients of a micro-batch, flat."""
        self.earlier: Tensor | None = None
        """The sum of `own_gradients` over the earlier micro-batches of the step."""
        if stage == 3:  # stage 3 allocates both once
            self.bucket, self.own_gradients = torch.zeros(bucket, dtype=self.dtype), self.part(self.trained_elements, self.dtype)
            self.buffers += [self.bucket, self.own_gradients]
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(self.store_gradient)

    def part(self, elements: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor of the size of this rank's part of so many elements; empty if it is offloaded to the host."""
        return torch.zeros(0 if self.offload else ceil(elements / self.ranks), dtype=dtype)

    def offload_buffers(self, trained: list[Tensor], offload: bool, host: bool) -> list[Tensor]:
        """The buffers of offloading: the largest gradient on the device; on the host its copy, fp32 gradients and new weights.

        Stage 3 copies from its own part of the gradients.
        """
        if not offload or (self.stage == 3 and not host):
            return []
        largest = max(p.numel() for p in trained)
        on_device = [torch.zeros(largest, dtype=self.dtype)]
        if not host:
            return on_device
        flat = [self.part(elements_of(group), dtype) for group in self.groups for dtype in (torch.float32, self.dtype)]
        return [*on_device, torch.zeros(largest, dtype=self.dtype), *flat]

    def store_gradient(self, parameter: Tensor) -> None:
        """Free the gradient of `parameter` once it is in the bucket, or reduced if it is larger."""
        gradient = parameter.grad
        assert gradient is not None, "the hook runs after the gradient is accumulated"
        if self.bucket is None:
            self.bucket = torch.empty(self.bucket_elements, dtype=self.dtype)
        if self.stage < 3:
            self.wait_for_reduction(gradient)
        parameter.grad = None

    def wait_for_reduction(self, gradient: Tensor) -> None:
        """Put `gradient` in the bucket. A bucket that has no room for it is reduced first."""
        if sum(elements for elements, _ in self.unreduced) + gradient.numel() > self.bucket_elements:
            self.reduce_bucket()
        large = gradient if gradient.numel() > self.bucket_elements else None
        self.unreduced.append((min(gradient.numel(), ceil(self.trained_elements / self.ranks)), large))

    def reduce_bucket(self) -> None:
        """Copy the gradients of the bucket into this rank's part of all gradients, which the first reduction allocates.

        Offloading computes the norm of each one instead, in float64: a copy of 8 bytes an element.
        """
        for elements, _ in self.unreduced if self.offload else ():
            torch.empty(elements, dtype=torch.float64)
        if self.unreduced and self.own_gradients is None:
            self.own_gradients = self.part(self.trained_elements, self.dtype)
        self.unreduced.clear()

    def earlier_gradients(self) -> None:
        """Allocate the gradients as they are after a first micro-batch: stage 1 reduces them after the last one."""
        if self.stage == 2:
            self.earlier = self.part(self.trained_elements, self.dtype)
        for parameter in (p for group in self.groups for p in group if self.stage == 1):
            parameter.grad = torch.zeros_like(parameter)

    def backward(self, loss: Tensor, loss_weight: float, last: bool = True) -> None:
        super().backward(loss, loss_weight, last)
        self.reduce_bucket()
        if self.stage == 2:  # stage 1 frees the bucket at the update
            self.bucket = None
        if self.earlier is not None:
            self.own_gradients = None

    def update(self) -> None:
        """DeepSpeed frees the gradients when it has copied those of all groups, flat and in fp32."""
        for parameter in (p for group in self.groups for p in group if p.grad is not None):
            self.store_gradient(parameter)
        self.reduce_bucket()
        if self.stage < 3:
            self.bucket = None
        for group, master in zip(self.groups, self.flat_masters, strict=True):
            if not self.offload:
                flat = self.part(elements_of(group), self.dtype)
                master.grad = flat.float()
                del flat
        if self.stage < 3:
            self.own_gradients = self.earlier = None
        for event in self.on_gradients:  # the memory planner labels gradients in this event
            event(self.run)
        self.optimizer.step()
        self.scheduler.step()
        self.zero_grad()


def elements_of(parameters: list[Tensor]) -> int:
    return sum(p.numel() for p in parameters)
