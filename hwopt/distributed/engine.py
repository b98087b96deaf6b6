"""Engine: backward, unscale, clip and step on one device. hwopt.distributed.data_parallel is the engine of several ranks.

Designed for low overhead: the parameter list is built once, no step walks the modules, the inner optimizer and scheduler are
called directly, and no value is read from the device if the optimizer accepts `found_inf`. Plugins may bring their own engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hwopt.data.batches.step_batch import MicroBatch, StepBatch
from hwopt.distributed.oom_backoff import OomBackoff
from hwopt.plugin.run_view import RunView
from hwopt.tensor_tree import copy_into, map_tensors

JOB_KEYS = ("lr", "initial_lr", "weight_decay", "eps")  # keys of a parameter group that come from the job; no step changes them


def new_cpu_group() -> dist.ProcessGroup:
    """A process group of all ranks over gloo, for values in host memory. All ranks call it."""
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)  # every rank is in it
    return group


class Engine:
    """What the loop calls for each micro-batch (`backward`) and after the last one (`update`)."""

    supports_retry = True
    """Whether a step can be retried after it ran out of memory. False if other ranks wait inside the step."""
    accumulates = True
    """Whether a step may have several micro-batches."""
    meets_in_micro_batches = False
    """Whether ranks communicate inside a micro-batch, so that every rank needs the same number of micro-batches."""
    cpu_group: dist.ProcessGroup | None = None
    """A gloo group of all ranks; None on a single rank."""
    whole_gradients = True
    """Whether each rank holds the whole gradient between the backward pass and the update."""
    keeps_masters = False
    """Whether the engine itself converts the weights to half precision and keeps fp32 masters of them."""

    def __init__(self, run: RunView) -> None:
        self.run = run
        device = run.device
        self.optimizer: Any = run.optimizer
        self.scheduler, self.scaler = run.scheduler, run.scaler
        self.parameters = [p for group in run.optimizer.param_groups for p in group["params"]]
        self.names = run.parameter_names
        self.masters = run.recipe.masters
        # with fp32 masters the optimizer updates the masters; the gradients of the half parameters must be dropped too
        own = {id(p) for p in self.parameters}
        trained = [p for p in run.inner_model.parameters() if p.requires_grad]
        self.zeroed = [*self.parameters, *(p for p in trained if id(p) not in own)]
        self.max_norm = run.training.max_grad_norm
        half = any(p.dtype in (torch.float16, torch.bfloat16) for p in self.parameters)
        self.norm_dtype = torch.float32 if half else None
        """The dtype of the gradient norm, None for that of the gradients: a norm in half precision has 8 or 11 bits."""
        self.takes_found_inf = bool(getattr(run.optimizer, "_step_supports_amp_scaling", False))
        self.factor = torch.zeros((), device=device)
        self.norm = torch.zeros((), device=device)
        """The gradient norm of the last step, a new tensor each step; not finite if the update was skipped."""
        self.found_inf = torch.zeros((), device=device)
        self.on_gradients: list[Callable[[RunView], None]] = [run.recipe.events.on_gradients]

    def init_state(self, force: bool = False) -> None:
        """Create the optimizer's state before step 1, so that the first update cannot run out of memory.

        An optimizer may have a method for it, `create_state()`. With `found_inf` set the update is skipped, which changes no bit.
        Other optimizers do so only with `force`, in a step with zero gradients; the caller must then overwrite weights and state.
        """
        if hasattr(self.optimizer, "create_state"):
            self.optimizer.create_state()
            return
        if not self.takes_found_inf and not force:
            return
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)
        if self.takes_found_inf:
            self.optimizer.found_inf = torch.ones_like(self.found_inf)
        self.optimizer.step()
        if self.takes_found_inf:
            del self.optimizer.found_inf  # a GradScaler sets its own
        self.zero_grad()

    @property
    def has_late_state(self) -> bool:
        """Whether the first update creates the optimizer's state, because `init_state` cannot."""
        return not (self.takes_found_inf or hasattr(self.optimizer, "create_state"))

    def micro_batches(self, batch: StepBatch, rung: int) -> Iterator[tuple[MicroBatch, bool]]:
        """The micro-batches of `batch`, each with whether it is the last one."""
        return batch.micro_batches(rung)

    def synchronized(self, backoff: OomBackoff) -> AbstractContextManager[None]:
        """A block that each rank runs alone. Engines of several ranks make all ranks leave it with the same result."""
        return nullcontext()

    def backward(self, loss: Tensor, loss_weight: float, last: bool = True) -> None:
        """Backward of `loss`, a sum. `loss_weight`: 1 / units of the step over all ranks. `last`: of its micro-batches."""
        self.set_factor(loss_weight, loss.dtype)
        loss.backward(gradient=self.factor)

    def set_factor(self, loss_weight: float, dtype: torch.dtype) -> None:
        """Fill `factor`, by which the backward pass multiplies a loss of `dtype`: `loss_weight` times the loss scale."""
        if self.factor.dtype != dtype:
            self.factor = self.factor.to(dtype)
        if self.scaler is None:
            self.factor.fill_(loss_weight)
        else:
            self.factor.copy_(self.scaler.scale(torch.ones_like(self.factor)).mul_(loss_weight))

    def loss_scale(self) -> Tensor | None:
        """The current loss scale, a scalar on the device; None without a loss scaler."""
        return None if self.scaler is None else self.scaler.scale(torch.ones_like(self.norm))

    def all_reduce_max(self, value: int) -> int:
        """The maximum of `value` over all ranks. All ranks call it."""
        if self.cpu_group is None:
            return value
        maximum = torch.tensor(value)
        dist.all_reduce(maximum, dist.ReduceOp.MAX, group=self.cpu_group)
        return int(maximum)

    def all_gather(self, value: Any) -> list[Any]:
        """The `value` of every rank, in order of rank. All ranks call it."""
        values: list[Any] = [value] * self.run.world_size
        if self.cpu_group is not None:
            dist.all_gather_object(values, value, group=self.cpu_group)
        return values

    def exported(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """`weights`, unsharded and in the precision that is trained, on the first rank. All ranks call it."""
        return weights

    def unsharded_model(self) -> Any:
        """The model with plain parameters. Called by all ranks, after the last step."""
        return self.run.inner_model

    def snapshot(self, copy: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Name -> `copy` of each trained parameter, unsharded; empty except on the first rank. All ranks call it."""
        whole = zip(self.names, map(self.unshard, self.parameters), strict=True)
        return {name: copy(value) for name, value in whole if self.run.is_main}

    @torch.no_grad()
    def restore(self, snapshot: Mapping[str, Tensor]) -> None:
        """Load a `snapshot` into the parameters, on every rank. Raises ValueError if it belongs to another model."""
        if snapshot.keys() != set(self.names):
            different = sorted(snapshot.keys() ^ set(self.names))
            raise ValueError(f"{len(different)} parameters are trained in only one of the two: {', '.join(different[:4])}")
        for name, parameter in zip(self.names, self.parameters, strict=True):
            if snapshot[name].shape != (shape := self.full_shape(parameter)):
                raise ValueError(f"{name} has shape {tuple(snapshot[name].shape)}, and {tuple(shape)} in this run")
            parameter.copy_(self.shard(snapshot[name], parameter))

    def unshard(self, value: Any) -> Any:
        """The whole tensor of `value`, of which this rank may hold a shard. All ranks call it."""
        return value.detach() if isinstance(value, Tensor) else value

    def shard(self, value: Tensor, like: Tensor) -> Tensor:
        """This rank's shard of the whole tensor `value`, on the device of `like`."""
        return value.to(like.device)

    def full_shape(self, parameter: Any) -> torch.Size:
        """The shape of the whole parameter, of which this rank may hold a shard."""
        return torch.Size(parameter.shape)

    def state(self, copy: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        """The state that the next steps need, on any number of ranks; only the first rank has tensors. All ranks call it."""
        state = {"parameters": self.snapshot(copy), "optimizer": self.optimizer_state(copy)}
        return state if self.scaler is None else state | {"scaler": self.scaler.state_dict()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the `state` saved after step `run.step`. All ranks call it. Raises ValueError if it is that of another run."""
        self.load_optimizer_state(state["optimizer"])
        self.restore(state["parameters"])
        if self.masters is not None:
            self.masters.publish()
        if self.scaler is not None and "scaler" in state:
            self.scaler.load_state_dict(state["scaler"])
        self.scheduler.last_epoch = self.run.step - 1
        self.scheduler.step()

    def optimizer_state(self, copy: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        """The optimizer's class name, its state by parameter name, and the numbers of its groups that steps change."""
        states: dict[str, Any] = {}
        for name, parameter in zip(self.names, self.parameters, strict=True):
            own = self.optimizer.state.get(parameter, {})
            states[name] = map_tensors(copy, {key: self.unshard(value) for key, value in own.items()})
        groups = [
            {key: value for key, value in group.items() if key not in JOB_KEYS and type(value) in (int, float)}
            for group in self.optimizer.param_groups
        ]
        return {"class": type(self.optimizer).__name__, "states": states, "groups": groups}

    @torch.no_grad()
    def load_optimizer_state(self, state: Mapping[str, Any]) -> None:
        """Overwrite the state that the optimizer first creates. Raises ValueError for a state of another optimizer."""
        self.init_state(force=True)
        for name, parameter in zip(self.names, self.parameters, strict=True):
            saved = state["states"].get(name)
            if not saved:  # the parameter had no gradient before the checkpoint
                self.optimizer.state.pop(parameter, None)
                continue
            current = self.optimizer.state[parameter]
            try:
                if current.keys() != saved.keys():
                    raise ValueError(f"it has {sorted(saved)}, expected {sorted(current)}")
                for key, value in current.items():
                    current[key] = self.copy_into(value, saved[key])
            except ValueError as error:
                raise ValueError(f"{self.optimizer_change(state)}the optimizer state of {name} does not fit: {error}") from error
        for group, numbers in zip(self.optimizer.param_groups, state["groups"], strict=False):
            group.update(numbers)

    def optimizer_change(self, state: Mapping[str, Any]) -> str:
        """ "the optimizer was A and is B; " if the saved `state` is that of another class, else ""."""
        now = type(self.optimizer).__name__
        return "" if state["class"] == now else f"the optimizer was {state['class']} and is {now}; "

    def copy_into(self, target: Any, saved: Any) -> Any:
        """`saved`, copied into the tensors of `target`, of which this rank may hold a shard."""
        return copy_into(target, saved)

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for parameter in self.zeroed:
            parameter.grad = None

    def update(self) -> None:
        """Clip, update the weights unless a gradient is not finite, and step the schedule in either case."""
        if self.masters is not None:
            self.masters.collect()
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        for event in self.on_gradients:
            event(self.run)
        self._measure_and_clip()
        self._step()
        if self.masters is not None:
            self.masters.publish()
        self.scheduler.step()
        self.zero_grad()

    def update_applied(self) -> Tensor:
        """Whether the last update changed the weights: a bool scalar on the device. False if a gradient was not finite."""
        return self.found_inf == 0

    def gradients(self) -> list[tuple[str, Tensor]]:
        """(name, gradient) of every trained parameter that has one: whole on every rank, unscaled in the event `on_gradients`."""
        assert self.whole_gradients, f"{type(self).__name__} has no whole gradients"
        return [(name, p.grad) for name, p in zip(self.names, self.parameters, strict=True) if p.grad is not None]

    def local_gradients(self) -> list[Tensor]:
        """The gradients, or gradient shards, that this rank holds."""
        return [p.grad for p in self.parameters if p.grad is not None]

    def norm_of(self, gradients: list[Tensor]) -> Tensor:
        """The norm of the whole gradient over all ranks, a scalar; this rank holds `gradients`."""
        norms = torch._foreach_norm(gradients, 2.0, self.norm_dtype)
        return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))

    def _measure_and_clip(self) -> None:
        gradients = self.local_gradients()
        self.norm = norm = self.norm_of(gradients)
        torch.ne(norm - norm, 0, out=self.found_inf)  # inf - inf and nan - nan are nan, and nan != 0
        if self.max_norm:
            torch._foreach_mul_(gradients, torch.clamp(self.max_norm / (norm + 1e-6), max=1.0))

    def _step(self) -> None:
        if self.scaler is not None:
            # the norm is the same on all ranks, and it may overflow although no element does
            for found_inf in self.scaler._found_inf_per_device(self.optimizer).values():
                torch.maximum(found_inf, self.found_inf, out=found_inf)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif self.takes_found_inf:
            self.optimizer.found_inf = self.found_inf
            self.optimizer.step()
        elif not self.found_inf.item():  # reads from the device in every step: this optimizer cannot skip an update itself
            self.optimizer.step()
