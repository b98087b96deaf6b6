"""Engine: backward, unscale, clip and step on one device. Several ranks have hwopt.data_parallel; DeepSpeed and FSDP their own.

Lean on purpose: the parameter list is made once, no module is walked in a step, the inner optimizer and scheduler are driven
directly, and nothing is read back from the device where the optimizer takes `found_inf`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from hwopt.distributed.oom_backoff import OomBackoff
from hwopt.saving.tensor_tree import copy_into, map_tensors

if TYPE_CHECKING:
    from hwopt.data.step_batch import MicroBatch, StepBatch
    from hwopt.plugin.run_view import RunView


class Engine:
    """What the loop calls around each micro-batch (`before`, `backward`) and after the last one (`finish`)."""

    supports_retry = True
    """Whether a step may be begun again after it has failed: not where other ranks wait inside of it."""
    meets_in_micro_batches = False
    """Whether ranks meet inside a micro-batch, so that each must have as many of them as the others."""
    cpu_group: dist.ProcessGroup | None = None
    """All ranks, by the network of their hosts, where there are several."""
    whole_gradients = True
    """Whether each rank holds the whole gradient between the backward pass and the update."""
    keeps_masters = False
    """Whether it makes the model's weights half under a half precision, and keeps fp32 masters of them itself."""

    def __init__(self, run: RunView) -> None:
        self.run = run
        device = run.device
        self.optimizer, self.scheduler, self.scaler = run.optimizer, run.scheduler, run.scaler
        self.parameters = [p for group in run.optimizer.param_groups for p in group["params"]]
        self.names = run.parameter_names
        self.masters = run.recipe.masters
        # fp32 masters step in place of the model's half parameters, whose gradients must go too
        own = {id(p) for p in self.parameters}
        trained = [p for p in run.inner_model.parameters() if p.requires_grad]
        self.zeroed = [*self.parameters, *(p for p in trained if id(p) not in own)]
        self.max_norm = run.training.max_grad_norm
        self.takes_found_inf = bool(getattr(run.optimizer, "_step_supports_amp_scaling", False))
        self.factor = torch.zeros((), device=device)
        self.norm = torch.zeros((), device=device)
        """Of the last step's whole gradient, a tensor of its own each step; not finite where the update was left out."""
        self.found_inf = torch.zeros((), device=device)
        self.on_gradients = list(run.recipe.events["gradients"])

    def init_state(self, force: bool = False) -> None:
        """The optimizer's state before step 1, so that the first update cannot be the one that runs out of memory.

        An update that is left out changes no bit. Optimizers that take no `found_inf` make their state in step 1, or here
        by a step without gradients, `force`: what it changes must be written over.
        """
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

    def micro_batches(self, batch: StepBatch, rung: int) -> Iterator[tuple[MicroBatch, bool]]:
        """Those of `batch`, and whether each is the last one; where ranks meet inside them, as many on every rank."""
        return batch.micro_batches(rung)

    def set_gradient_sync(self, last: bool) -> None:
        """Ahead of a micro-batch's forward: wrappers that reduce in its backward read there whether they should."""

    def synchronized(self, backoff: OomBackoff) -> AbstractContextManager[None]:
        """What a rank does alone; engines of several ranks see to it that all end the block alike."""
        return nullcontext()

    def backward(self, loss: Tensor, loss_weight: float) -> None:
        """Backward of a summed loss, of which each unit weighs `share` in the mean over the whole step and all ranks."""
        if self.factor.dtype != loss.dtype:
            self.factor = self.factor.to(loss.dtype)
        if self.scaler is None:
            self.factor.fill_(loss_weight)
        else:
            self.factor.copy_(self.scaler.scale(torch.ones_like(self.factor)).mul_(loss_weight))
        loss.backward(gradient=self.factor)

    def loss_scale(self) -> Tensor | None:
        """What the loss is multiplied with at present; None where it is not."""
        return None if self.scaler is None else self.scaler.scale(torch.ones_like(self.norm))

    def all_reduce_max(self, value: int) -> int:
        """The greatest of what the ranks value. All ranks call it."""
        if self.cpu_group is None:
            return value
        told = torch.tensor(value)
        dist.all_reduce(told, dist.ReduceOp.MAX, group=self.cpu_group)
        return int(told)

    def all_gather(self, value: Any) -> list[Any]:
        """`value` of every rank. All ranks call it."""
        found: list[Any] = [value] * self.run.world_size
        if self.cpu_group is not None:
            dist.all_gather_object(found, value, group=self.cpu_group)
        return found

    def exported(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """`weights` of the model whole and in the precision that is trained, on the first rank. All ranks call it."""
        return weights

    def unsharded_model(self) -> Any:
        """The model with plain parameters, once training is over. All ranks call it."""
        return self.run.inner_model

    def snapshot(self, kept: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """On the first rank, what is trained, by name, whole and in the precision that is trained. All ranks call it.

        `kept` makes the copies that later steps do not reach.
        """
        found = {}
        for name, parameter in zip(self.names, self.parameters, strict=True):
            value = self.unshard(parameter)
            if self.run.is_main:
                found[name] = kept(value)
        return found

    @torch.no_grad()
    def restore(self, snapshot: Mapping[str, Tensor]) -> None:
        """Put the tensors of a `snapshot` back, on every rank. Raises ValueError where they are not those of this model."""
        if snapshot.keys() != set(self.names):
            odd = sorted(snapshot.keys() ^ set(self.names))
            raise ValueError(f"{len(odd)} parameters are trained in one and not in the other: {', '.join(odd[:4])}")
        for name, parameter in zip(self.names, self.parameters, strict=True):
            if snapshot[name].shape != (shape := self.full_shape(parameter)):
                raise ValueError(f"{name} is {tuple(snapshot[name].shape)}, and here {tuple(shape)}")
            parameter.copy_(self.shard(snapshot[name], parameter))

    def unshard(self, value: Any) -> Any:
        """A tensor of which this rank may hold a part. All ranks call it."""
        return value.detach() if isinstance(value, Tensor) else value

    def shard(self, value: Tensor, like: Tensor) -> Tensor:
        """What this rank holds of a whole tensor, on the device of `like`."""
        return value.to(like.device)

    def full_shape(self, parameter: Any) -> torch.Size:
        """Of a parameter of which this rank may hold a part."""
        return torch.Size(parameter.shape)

    def state(self, kept: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        """All that decides the next steps: weights, the optimizer's state by name, loss scale. All ranks call it.

        The same whatever the number of ranks; tensors only on the first one.
        """
        found = {"parameters": self.snapshot(kept), "optimizer": self.optimizer_state(kept)}
        return found if self.scaler is None else found | {"scaler": self.scaler.state_dict()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` was when the optimizer had stepped `run.step` times. All ranks call it.

        Raises ValueError where it is another model's or another optimizer's.
        """
        self.load_optimizer_state(state["optimizer"])
        self.restore(state["parameters"])
        if self.masters is not None:
            self.masters.publish()
        if self.scaler is not None and "scaler" in state:
            self.scaler.load_state_dict(state["scaler"])
        self.scheduler.last_epoch = self.run.step - 1
        self.scheduler.step()

    def optimizer_state(self, kept: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        states: dict[str, Any] = {}
        for name, parameter in zip(self.names, self.parameters, strict=True):
            states[name] = map_tensors(
                kept, {key: self.unshard(value) for key, value in self.optimizer.state.get(parameter, {}).items()}
            )
        groups = [{key: value for key, value in group.items() if counts(key, value)} for group in self.optimizer.param_groups]
        return {"class": type(self.optimizer).__name__, "states": states, "groups": groups}

    @torch.no_grad()
    def load_optimizer_state(self, state: Mapping[str, Any]) -> None:
        """Whatever optimizer it is: its own first step makes the state, which is then written over."""
        self.init_state(force=True)
        for name, parameter in zip(self.names, self.parameters, strict=True):
            saved = state["states"].get(name)
            if not saved:  # it has had no gradient yet
                self.optimizer.state.pop(parameter, None)
                continue
            made = self.optimizer.state[parameter]
            try:
                if made.keys() != saved.keys():
                    raise ValueError(f"there is {sorted(saved)} for {sorted(made)}")
                for key, value in made.items():
                    made[key] = self.copy_into(value, saved[key])
            except ValueError as error:
                raise ValueError(
                    f"the optimizer was {state['class']} and is {type(self.optimizer).__name__} now; in {name}, {error}"
                    if state["class"] != type(self.optimizer).__name__
                    else f"in the optimizer's state of {name}, {error}"
                ) from error
        for group, numbers in zip(self.optimizer.param_groups, state["groups"], strict=False):
            group.update(numbers)

    def copy_into(self, made: Any, saved: Any) -> Any:
        """`saved` in the shape of `made`, of which this rank may hold a part."""
        return copy_into(made, saved)

    def zero_grad(self) -> None:
        """Forget the partial gradients of a step."""
        for parameter in self.zeroed:
            parameter.grad = None

    def finish(self) -> None:
        """Clip once, step the optimizer unless a gradient is not finite, advance the schedule in either case."""
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
        """Whether the last update changed the weights: a bool scalar on the device. False where a gradient was not finite."""
        return self.found_inf == 0

    def gradients(self) -> list[tuple[str, Tensor]]:
        """(name, gradient) of every trained parameter that has one, whole on every rank; unscaled in the event `gradients`.

        An engine without `whole_gradients` has none to give.
        """
        assert self.whole_gradients, f"{type(self).__name__} has no whole gradients"
        return [(name, p.grad) for name, p in zip(self.names, self.parameters, strict=True) if p.grad is not None]

    def local_gradients(self) -> list[Tensor]:
        """The gradients, or parts of gradients, that this rank holds."""
        return [p.grad for p in self.parameters if p.grad is not None]

    def norm_of(self, gradients: list[Tensor]) -> Tensor:
        """The norm of the step's whole gradient, of which this rank holds `gradients`."""
        norms = torch._foreach_norm(gradients)
        return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))

    def _measure_and_clip(self) -> None:
        gradients = self.local_gradients()
        self.norm = norm = self.norm_of(gradients)
        torch.ne(norm - norm, 0, out=self.found_inf)  # inf - inf and nan - nan are nan, which equals nothing
        if self.max_norm:
            torch._foreach_mul_(gradients, torch.clamp(self.max_norm / (norm + 1e-6), max=1.0))

    def _step(self) -> None:
        if self.scaler is not None:
            # the norm may overflow where no element does, and is the same on all ranks
            for found in self.scaler._found_inf_per_device(self.optimizer).values():
                torch.maximum(found, self.found_inf, out=found)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif self.takes_found_inf:
            self.optimizer.found_inf = self.found_inf
            self.optimizer.step()
        elif not self.found_inf.item():  # one host read a step: such an optimizer must not be called
            self.optimizer.step()


USERS_OWN = ("lr", "initial_lr", "weight_decay", "eps")
"""Numbers of a parameter group that come from the job, not from the steps that were made."""


def counts(key: str, value: Any) -> bool:
    """Whether a key of a parameter group is a number that steps change."""
    return key not in USERS_OWN and isinstance(value, (int, float)) and not isinstance(value, bool)
