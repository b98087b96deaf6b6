"""ZeroEngine: DeepSpeed's engine, created by Accelerate, driven by hwopt's loop with micro-batches of different sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hwopt.distributed.engine import new_cpu_group
from hwopt.distributed.sharded_engine import ShardedEngine
from hwopt.errors import NonFiniteError
from hwopt.plugin import RunView


class ZeroEngine(ShardedEngine):
    """DeepSpeed averages gradients over the ranks, clips, and skips updates that overflow.

    The loss is multiplied by the number of ranks, because hwopt divides it by the count of all ranks already.
    """

    keeps_masters = True

    def __init__(self, run: RunView) -> None:
        self.trained = {name: p for name, p in run.inner_model.named_parameters() if p.requires_grad}
        self.deepspeed = run.model = prepare(run)
        super().__init__(run)
        self.parameters = self.partitions()
        self.cpu_group = new_cpu_group()

    def init_state(self, force: bool = False) -> None:
        """As `Engine.init_state`, one partition at a time: the gradients of all would need as much memory as the masters.

        DeepSpeed itself creates the state in its first step, between the blocks of the activations.
        """
        optimizer = self.flat_optimizer
        if not self.takes_found_inf and not force:
            return
        groups = optimizer.param_groups
        params = [group["params"] for group in groups]  # in stage 3 the groups are empty between steps
        group_of = getattr(self.deepspeed.optimizer, "sub_group_to_group_id", {})
        if self.takes_found_inf:
            optimizer.found_inf = torch.ones_like(self.found_inf)
        for number, partition in enumerate(self.partitions()):
            gradient, partition.grad = partition.grad, torch.zeros_like(partition)
            for index, group in enumerate(groups):
                group["params"] = [partition] if index == group_of.get(number, number) else []
            optimizer.step()
            partition.grad = gradient
        for group, before in zip(groups, params, strict=True):
            group["params"] = before
        if self.takes_found_inf:
            del optimizer.found_inf

    def backward(self, loss: Tensor, loss_weight: float, last: bool = True) -> None:
        self.deepspeed.set_gradient_accumulation_boundary(last)
        self.deepspeed.backward(loss * (loss_weight * self.run.world_size))

    def zero_grad(self) -> None:
        self.deepspeed.optimizer.zero_grad(set_to_none=True)

    def update(self) -> None:
        self.deepspeed.step()
        skipped = bool(self.deepspeed.optimizer.overflow)
        norm = math.inf if skipped else float(self.deepspeed.get_global_grad_norm() or 0.0)
        if not skipped and not 0 <= norm < math.inf:
            import deepspeed

            raise NonFiniteError(
                f"plugin 'zero': DeepSpeed {deepspeed.__version__} updated the weights with a gradient that is not finite. "
                "The weights are lost. Install another version of DeepSpeed, or remove [plugins.zero]"
            )
        self.found_inf.fill_(float(skipped))
        self.norm = torch.full_like(self.norm, norm)
        self.scheduler.step()

    def loss_scale(self) -> Tensor | None:
        if not self.deepspeed.fp16_enabled():
            return None
        return torch.full_like(self.norm, float(self.deepspeed.optimizer.cur_scale))

    def partitions(self) -> list[Tensor]:
        """The flat fp32 partitions that this rank updates."""
        optimizer = self.deepspeed.optimizer
        stage_3 = getattr(optimizer, "fp32_partitioned_groups_flat", None)
        return list(stage_3 if stage_3 is not None else optimizer.single_partition_of_fp32_groups)

    def sizes(self) -> tuple[int, int]:
        """(elements that this rank updates, elements that all ranks update)."""
        whole = sum(getattr(p, "ds_numel", p.numel()) for p in self.trained.values())
        return sum(partition.numel() for partition in self.partitions()), whole

    def snapshot(self, copy: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        copies = {}
        for name, parameter in self.trained.items():
            value = self.unshard(parameter)
            if self.run.is_main:
                copies[name] = copy(value)
        return copies

    def unshard(self, value: Any) -> Any:
        from deepspeed.runtime.zero import GatheredParameters
        from deepspeed.utils import safe_get_full_fp32_param

        if value.requires_grad:
            return safe_get_full_fp32_param(value)
        with GatheredParameters([value], enabled=hasattr(value, "ds_id")):
            return value.detach().to("cpu", copy=True)

    def restore(self, snapshot: Mapping[str, Tensor]) -> None:
        set_masters(self.trained, snapshot)

    def optimizer_state(self, copy: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        from deepspeed.utils import safe_get_full_optimizer_state

        states: dict[str, Any] = {}
        self.link_state()
        for name, parameter in self.trained.items():
            states[name] = {"step": self.step_count()}
            for key in self.state_keys():
                value = safe_get_full_optimizer_state(parameter, key)
                if self.run.is_main:
                    states[name][key] = copy(value)
        scaler = vars(getattr(self.deepspeed.optimizer, "loss_scaler", None) or object)
        numbers = {key: value for key, value in scaler.items() if isinstance(value, (int, float))}
        return {"class": type(self.optimizer).__name__, "states": states, "groups": [], "loss_scaler": numbers}

    def load_optimizer_state(self, state: Mapping[str, Any]) -> None:
        self.init_state(force=True)
        self.link_state()
        keys = sorted(("step", *self.state_keys()))
        for name, parameter in self.trained.items():
            saved = state["states"].get(name, {})
            if sorted(saved) != keys:
                raise ValueError(
                    f"{self.optimizer_change(state)}the optimizer state of {name} does not fit: "
                    f"it has {sorted(saved)}, expected {keys}"
                )
            for key in self.state_keys():
                set_moments(parameter, key, saved[key])
            for partition in self.flat_optimizer.state.values():
                partition["step"] = torch.as_tensor(float(saved["step"])).to(partition["step"]).clone()
        for key, value in state.get("loss_scaler", {}).items():
            setattr(self.deepspeed.optimizer.loss_scaler, key, value)

    def link_state(self) -> None:
        """Link each parameter to its part of the optimizer's state.

        DeepSpeed links after the first step of the first group, when the other groups have no state yet.
        """
        zero = self.deepspeed.optimizer
        if hasattr(zero, "_lazy_init_hp_params_optimizer_state"):  # stages 1 and 2; stage 3 needs no links
            zero._hp_optimizer_states_linked = False
            zero._lazy_init_hp_params_optimizer_state()

    @property
    def flat_optimizer(self) -> Any:
        """The optimizer that DeepSpeed calls to update the flat partitions."""
        return self.deepspeed.optimizer.optimizer

    def state_keys(self) -> list[str]:
        """The keys of the optimizer's per-element state, sorted: ["exp_avg", "exp_avg_sq"] for Adam."""
        states = [state for state in self.flat_optimizer.state.values() if state]
        return sorted(key for key, value in states[0].items() if isinstance(value, Tensor) and value.dim()) if states else []

    def step_count(self) -> float:
        """Updates that the optimizer has made."""
        return max((float(state["step"]) for state in self.flat_optimizer.state.values() if "step" in state), default=0.0)

    def full_shape(self, parameter: Any) -> torch.Size:
        return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def prepare(run: RunView) -> Any:
    """DeepSpeed's engine for the run's model. The fp32 masters get the weights before they are rounded."""
    config = run.accelerator.state.deepspeed_plugin.deepspeed_config
    config["train_micro_batch_size_per_gpu"] = run.batch.train
    config["train_batch_size"] = run.batch.train * run.world_size
    config["gradient_clipping"] = float(run.training.max_grad_norm or 0.0)
    values = {name: p.detach().clone() for name, p in run.inner_model.named_parameters() if p.requires_grad}
    engine, _ = run.accelerator.prepare(run.inner_model, run.optimizer)
    if engine.fp16_enabled() or engine.bfloat16_enabled():
        set_masters(dict(run.inner_model.named_parameters()), values)
    return engine


@torch.no_grad()
def set_masters(parameters: Mapping[str, Any], values: Mapping[str, Tensor]) -> None:
    """Set the fp32 masters and the weights of `parameters` to `values`, by name."""
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
    """Set the optimizer state `key` of `parameter` to the whole tensor `value`; this rank keeps its part."""
    from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

    value = value.to(parameter.device)
    if hasattr(parameter, "ds_id"):
        safe_set_local_optimizer_state(parameter, own_part(value), key)
    else:
        safe_set_full_optimizer_state(parameter, value, key)


def own_part(value: Tensor) -> Tensor:
    """This rank's part of `value` in stage 3, flat: equal parts, the last one padded with zeros.

    DeepSpeed's setter of whole tensors reads beyond the end if the number of ranks does not divide the number of elements.
    """
    size = -(-value.numel() // dist.get_world_size())
    flat = torch.nn.functional.pad(value.flatten(), (0, size * dist.get_world_size() - value.numel()))
    return flat.narrow(0, size * dist.get_rank(), size)
