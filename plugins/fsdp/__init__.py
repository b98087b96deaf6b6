"""FSDP: shards weights, gradients and optimizer state over several GPUs. Each layer is gathered only while it is computed.

Accelerate applies FSDP2 (`fully_shard`), which shards each parameter on its own. The weights of a layer are gathered for its
forward pass and again for its backward pass, while the previous layer computes. With half precision, gathered weights and matrix
products are half precision without autocast; shards, their update and the gradient reduction are fp32.
A step that ran out of memory cannot be run again, because the other ranks wait inside it.

Source: PyTorch FSDP, Zhao et al. 2023 (arXiv:2304.11277);
https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html.
Hardware: several CUDA devices.
Cost: every micro-batch gathers all weights twice and reduces all gradients.
Numerical effect: rounding.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from math import ceil
from typing import Any, ClassVar, Literal

from hwopt import plugin as hw

SETTINGS = {
    "fsdp_version": 2,
    "auto_wrap_policy": "transformer_based_wrap",
    "state_dict_type": "SHARDED_STATE_DICT",
    **dict.fromkeys(("cpu_offload", "cpu_ram_efficient_loading", "activation_checkpointing"), False),
}
"""Of Accelerate; `engine.shard_model` adds layers and precision. Accelerate would read missing values from the environment."""


class Fsdp(hw.Plugin):
    name = "fsdp"
    stage = hw.Stage.DISTRIBUTION
    effect = "rounding"
    traits = hw.Traits(lacks=("whole_gradients", "whole_parameters", "whole_weights", "whole_graph", "packed_weights", "retry"))
    aliases: ClassVar[Mapping[str, str]] = {"fsdp": "enabled = true"}

    class Options(hw.PluginOptions):
        reshard_after_forward: bool = True
        """Free gathered weights after forward and gather them again for backward; false: faster, more memory."""
        reduce: Literal["micro_batch", "step"] = "micro_batch"
        """When gradients are reduced: after each micro-batch, or once per step (more memory)."""

    options: Options

    def probe(self, context: hw.Context) -> hw.Decision:
        if context.hardware.device_type == "cpu":
            return hw.Decision.skip(
                "needs CUDA devices, found a CPU: there Accelerate raises an error with FSDP1, and shards nothing with FSDP2"
            )
        ranks = context.world_size
        if ranks == 1:
            return hw.Decision.skip("needs several ranks, found 1. Start one per GPU (--processes auto)")
        gathered = "for forward and backward" if self.options.reshard_after_forward else "once per micro-batch"
        reduced = "once per step" if self.options.reduce == "step" else "once per micro-batch"
        return hw.Decision.apply(
            f"shards weights, gradients and state over {ranks} ranks; layers gathered {gathered}, gradients reduced {reduced}"
        )

    def apply(self, recipe: hw.Recipe, context: hw.Context) -> None:
        from unittest import mock

        recipe.process.append(partial(mock.patch.dict, os.environ))  # Accelerate sets variables, which the next run would read
        settings = hw.Lazy("accelerate.utils:FullyShardedDataParallelPlugin")
        recipe.accelerator["fsdp_plugin"] = partial(
            settings, **SETTINGS, reshard_after_forward=self.options.reshard_after_forward
        )
        recipe.engine = partial(hw.Lazy("hwopt_plugins.fsdp.engine:FsdpEngine"), reduce=self.options.reduce)

    def memory(self, spec: hw.MemorySpec, context: hw.Context) -> None:
        part = 1 / context.world_size
        stand_in = hw.Lazy("hwopt_plugins.fsdp.engine:FsdpStandIn")
        spec.stand_ins["engine"] = partial(stand_in, reshard_after_forward=self.options.reshard_after_forward)
        spec.held |= {"weights": part, "optimizer_state": part, "update": part}
        if self.options.reduce == "micro_batch":
            spec.held["gradients"] = part

    @classmethod
    def alternatives(cls, options: Any | None, context: hw.Context) -> list[hw.Scale]:
        if context.hardware.device_type == "cpu" or context.world_size == 1 or options == cls.Options():
            return []
        if options is None:
            on = hw.Choice(changes={}, note="shards weights, gradients and optimizer state over the ranks", time=1.1)
            return [hw.Scale(choices=(on, hw.OFF), present=1)]
        note = "gathers every layer twice and reduces after each micro-batch"
        least = hw.Choice(changes=cls.Options().model_dump(), note=note, time=1.1)
        return [hw.Scale(choices=(least, hw.Choice(changes=options.model_dump())), present=1)]

    def evidence(self, run: hw.RunView) -> hw.Evidence:
        from torch.distributed.fsdp import FSDPModule
        from torch.distributed.tensor import DTensor

        parameters = list(run.inner_model.parameters())
        units = sum(isinstance(module, FSDPModule) for module in run.inner_model.modules())
        shards = [p for p in parameters if isinstance(p, DTensor)]
        local, total = sum(p.to_local().numel() for p in shards), sum(p.numel() for p in parameters)
        gathered = run.observation.calls("FSDP::all_gather (")
        seen = (
            f"{units} modules sharded; this rank holds {local:,} of {total:,} elements, in {len(shards)} of {len(parameters)} "
            f"tensors; {gathered} all-gathers in this step"
        )
        limit = sum(ceil(p.shape[0] / run.world_size) * (p.numel() // p.shape[0]) for p in shards)  # split along the first axis
        updates_shards = all(isinstance(p, DTensor) for p in run.engine.parameters)
        all_sharded = len(shards) == len(parameters) and local <= limit
        sharded = all_sharded and updates_shards and run.world_size > 1 and units > 1
        if not run.observation.operators and sharded:
            return hw.Evidence.unknown(f"{seen}; no operators were recorded")
        return hw.Evidence.of(sharded and gathered, seen)
