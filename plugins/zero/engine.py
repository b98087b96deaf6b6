"""The engine of ZeRO: DeepSpeed's own, made by Accelerate, under the loop's uneven micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hwopt.distributed.sharded_engine import ShardedEngine
from hwopt.errors import NonFiniteError
from hwopt.plugin import RunView
from hwopt.saving.tensor_tree import HostCopies


class ZeroEngine(ShardedEngine):
    """Gradients are averaged by DeepSpeed, and so weighed by the number of ranks; it clips, and leaves out what overflows."""

    keeps_masters = True

    def __init__(self, run: RunView) -> None:
        self.named = {name: p for name, p in run.inner_model.named_parameters() if p.requires_grad}
        run.model, _ = prepared(run)
        super().__init__(run)
        self.deepspeed = run.model
        self.parameters = self.partitions()
        self.cpu_group = dist.new_group(backend="gloo")

    def init_state(self, force: bool = False) -> None:
        """DeepSpeed makes it in its first step, after which it knows each parameter's part."""
        if not force:
            return
        zero = self.deepspeed.optimizer
        for number, partition in enumerate(self.partitions()):
            held, partition.grad = partition.grad, torch.zeros_like(partition)
            group = self.inner.param_groups[getattr(zero, "sub_group_to_group_id", {}).get(number, number)]
            params, group["params"] = group["params"], [partition]  # stage 3 has none between two steps
            others = [other for other in self.inner.param_groups if other is not group]
            theirs = [other["params"] for other in others]
            for other in others:
                other["params"] = []
            self.inner.step()
            group["params"], partition.grad = params, held
            for other, kept in zip(others, theirs, strict=True):
                other["params"] = kept

    def set_gradient_sync(self, last: bool) -> None:
        self.deepspeed.set_gradient_accumulation_boundary(last)

    def backward(self, loss: Tensor, loss_weight: float) -> None:
        self.deepspeed.backward(loss * (loss_weight * self.run.world_size))

    def zero_grad(self) -> None:
        self.deepspeed.optimizer.zero_grad(set_to_none=True)

    def finish(self) -> None:
        self.deepspeed.step()
        left_out = bool(self.deepspeed.optimizer.overflow)
        norm = math.inf if left_out else float(self.deepspeed.get_global_grad_norm() or 0.0)
        if not left_out and not 0 <= norm < math.inf:
            import deepspeed

            raise NonFiniteError(
                f"plugin 'zero': DeepSpeed {deepspeed.__version__} has made an update with a gradient that is not finite; the "
                "weights are lost. Take another version of it, or remove [plugins.zero]"
            )
        self.found_inf.fill_(float(left_out))
        self.norm = torch.full_like(self.norm, norm)
        self.scheduler.step()

    def loss_scale(self) -> Tensor | None:
        if not self.deepspeed.fp16_enabled():
            return None
        return torch.full_like(self.norm, float(self.deepspeed.optimizer.cur_scale))

    def partitions(self) -> list[Tensor]:
        """What this rank steps on: flat, in fp32."""
        optimizer = self.deepspeed.optimizer
        stage_3 = getattr(optimizer, "fp32_partitioned_groups_flat", None)
        return list(stage_3 if stage_3 is not None else optimizer.single_partition_of_fp32_groups)

    def sizes(self) -> tuple[int, int]:
        """Elements that this rank steps on, and those of all ranks."""
        whole = sum(getattr(p, "ds_numel", p.numel()) for p in self.named.values())
        return sum(partition.numel() for partition in self.partitions()), whole

    def snapshot(self, kept: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_fp32_param

        found = {}
        for name, parameter in self.named.items():
            value = safe_get_full_fp32_param(parameter)  # all ranks meet in it
            if self.run.is_main:
                found[name] = kept(value)
        return found

    def restore(self, snapshot: Mapping[str, Tensor]) -> None:
        set_masters(self.named, snapshot)

    def optimizer_state(self, kept: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        from deepspeed.utils import safe_get_full_optimizer_state

        states: dict[str, Any] = {}
        self.link()
        for name, parameter in self.named.items():
            states[name] = {"step": self.steps()}
            for key in self.moments():
                value = safe_get_full_optimizer_state(parameter, key)
                if self.run.is_main:
                    states[name][key] = kept(value)
        scaler = vars(getattr(self.deepspeed.optimizer, "loss_scaler", None) or object)
        numbers = {key: value for key, value in scaler.items() if isinstance(value, (int, float))}
        return {"class": type(self.optimizer).__name__, "states": states, "groups": [], "loss_scaler": numbers}

    def load_optimizer_state(self, state: Mapping[str, Any]) -> None:
        self.init_state(force=True)
        self.link()
        made: tuple[str, ...] = ("step", *self.moments())
        for name, parameter in self.named.items():
            saved = state["states"].get(name, {})
            if sorted(saved) != sorted(made):
                raise ValueError(
                    f"the optimizer was {state['class']} and is {type(self.optimizer).__name__} now; in {name}, "
                    f"there is {sorted(saved)} for {sorted(made)}"
                )
            for key in self.moments():
                set_moments(parameter, key, saved[key])
            for partition in self.inner.state.values():
                partition["step"] = torch.as_tensor(float(saved["step"])).to(partition["step"]).clone()
        for key, value in state.get("loss_scaler", {}).items():
            setattr(self.deepspeed.optimizer.loss_scaler, key, value)

    def link(self) -> None:
        """Tell each parameter where its state lies: DeepSpeed does it after the first group's first step, before the others'."""
        zero = self.deepspeed.optimizer
        if hasattr(zero, "_lazy_init_hp_params_optimizer_state"):  # stage 3 asks each time
            zero._hp_optimizer_states_linked = False
            zero._lazy_init_hp_params_optimizer_state()

    @property
    def inner(self) -> Any:
        """The optimizer that DeepSpeed steps on flat partitions."""
        return self.deepspeed.optimizer.optimizer

    def moments(self) -> list[str]:
        """The tensors of its state, of which DeepSpeed knows each parameter's part."""
        states = [state for state in self.inner.state.values() if state]
        return sorted(key for key, value in states[0].items() if isinstance(value, Tensor) and value.dim()) if states else []

    def steps(self) -> float:
        """How often it has stepped."""
        return max((float(state["step"]) for state in self.inner.state.values() if "step" in state), default=0.0)

    def full_shape(self, parameter: Any) -> torch.Size:
        return torch.Size(getattr(parameter, "ds_shape", parameter.shape))

    def full_weights(self) -> dict[str, Tensor]:
        trained = self.snapshot(HostCopies(temporary=True))
        found: dict[str, Tensor] = {}
        for name, parameter in self.run.inner_model.named_parameters(remove_duplicate=False):
            if name not in self.named:
                value = gathered(parameter)
                if self.run.is_main:
                    found[name] = value
        first = {id(parameter): name for name, parameter in reversed(list(self.named.items()))}
        for name, parameter in self.run.inner_model.named_parameters(remove_duplicate=False):
            if self.run.is_main and id(parameter) in first:  # tied ones have several names
                found[name] = trained[first[id(parameter)]]
        return found


def prepared(run: RunView) -> tuple[Any, Any]:
    """(DeepSpeed's engine, its optimizer) of the run's model, whose fp32 values become the masters: none is rounded away."""
    config = run.accelerator.state.deepspeed_plugin.deepspeed_config
    config["train_micro_batch_size_per_gpu"] = run.batch.train
    config["train_batch_size"] = run.batch.train * run.world_size
    config["gradient_clipping"] = float(run.training.max_grad_norm or 0.0)
    values = {name: p.detach().clone() for name, p in run.inner_model.named_parameters() if p.requires_grad}
    engine, optimizer = run.accelerator.prepare(run.inner_model, run.optimizer)
    if engine.fp16_enabled() or engine.bfloat16_enabled():
        set_masters(dict(run.inner_model.named_parameters()), values)
    return engine, optimizer


@torch.no_grad()
def set_masters(parameters: Mapping[str, Any], values: Mapping[str, Tensor]) -> None:
    """The fp32 values that are stepped on, and the weights that the model computes with."""
    from deepspeed.runtime.zero import GatheredParameters
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

    for name, value in values.items():
        parameter = parameters[name]
        value = value.to(parameter.device)
        if hasattr(parameter, "ds_id"):
            safe_set_local_fp32_param(parameter, own_part(value))
            with GatheredParameters([parameter], modifier_rank=0):
                parameter.copy_(value)
        else:
            safe_set_full_fp32_param(parameter, value)
            parameter.copy_(value)


def set_moments(parameter: Any, key: str, value: Tensor) -> None:
    """A tensor of the optimizer's state, of which this rank keeps its part."""
    from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

    value = value.to(parameter.device)
    if hasattr(parameter, "ds_id"):
        safe_set_local_optimizer_state(parameter, own_part(value), key)
    else:
        safe_set_full_optimizer_state(parameter, value, key)


def own_part(value: Tensor) -> Tensor:
    """This rank's of the equal parts that stage 3 cuts a tensor into, the last one filled up: DeepSpeed's own setter of whole
    tensors reads beyond the end of one whose elements the ranks do not divide."""
    size = -(-value.numel() // dist.get_world_size())
    flat = torch.nn.functional.pad(value.flatten(), (0, size * dist.get_world_size() - value.numel()))
    return flat.narrow(0, size * dist.get_rank(), size)


def gathered(parameter: Any) -> Tensor:
    """A copy of a frozen parameter in the host's memory, whole."""
    if not hasattr(parameter, "ds_id"):
        return parameter.detach().cpu().clone()  # type: ignore[no-any-return]
    from deepspeed.runtime.zero import GatheredParameters

    with GatheredParameters([parameter]):
        return parameter.detach().cpu().clone()  # type: ignore[no-any-return]
