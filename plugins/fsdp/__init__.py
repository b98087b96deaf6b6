"""FSDP: weights, gradients and optimizer state spread over several GPUs; each layer is whole only while it is computed.

Source: Zhao et al. 2023, PyTorch FSDP (arXiv:2304.11277); https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
(FSDP2: shards of each parameter instead of flat ones); put on by Accelerate. Hardware: several CUDA devices.
Each layer's weights are gathered for its forward and again for its backward pass, the next ones on their way meanwhile. Under
half precision the gathered weights are half and products are too, without autocast; shards, their update and the sum of the
gradients over the ranks are fp32. Cost: every micro-batch gathers all weights twice and reduces all gradients.
Numerical effect: rounding. No step can be begun again after an out-of-memory: the other ranks wait inside of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from math import ceil
from typing import Any, ClassVar, Literal

from pydantic import Field

from hwopt.plugin import Context, Decision, Evidence, MemoryOption, MemorySpec, Plugin, PluginOptions, Recipe, RunView, Stage

LEFT_BEHIND = ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING")


@contextmanager
def environment_kept() -> Iterator[None]:
    """Accelerate writes its choice into the environment, where the next run of this process would find it."""
    before = {name: os.environ.get(name) for name in LEFT_BEHIND}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def accelerate_plugin(reshard_after_forward: bool) -> Any:
    """Accelerate's settings; those of layers and precision follow when the model is there (`engine.shard_model`)."""
    from accelerate.utils import FullyShardedDataParallelPlugin

    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=reshard_after_forward,
        auto_wrap_policy="transformer_based_wrap",
        state_dict_type="SHARDED_STATE_DICT",
        # what is not given here Accelerate would look for in the environment
        cpu_offload=False,
        cpu_ram_efficient_loading=False,
        activation_checkpointing=False,
    )


def make_engine(reduce: str, run: RunView) -> Any:
    from hwopt_plugins.fsdp.engine import FsdpEngine

    return FsdpEngine(run, reduce=reduce)


def make_stand_in(reshard_after_forward: bool, run: RunView) -> Any:
    from hwopt_plugins.fsdp.stand_in import StandIn

    return StandIn(run, reshard_after_forward)


class Fsdp(Plugin):
    name = "fsdp"
    stage = Stage.DISTRIBUTION
    preserves = "rounding"
    lacks = ("whole_gradients", "whole_parameters", "whole_weights", "whole_graph", "packed_weights", "retry")
    aliases: ClassVar[Mapping[str, str]] = {
        "fsdp": "enabled = true",
    }

    class Options(PluginOptions):
        reshard_after_forward: bool = Field(
            default=True,
            description="Free each layer's weights after its forward and gather them again; false: faster, keeps them whole.",
        )
        reduce: Literal["micro_batch", "step"] = Field(
            default="micro_batch",
            description="When gradients meet: after each micro-batch; or once a step, which keeps them whole until then.",
        )

    options: Options

    def probe(self, context: Context) -> Decision:
        if context.hardware.device_type == "cpu":
            return Decision.skip(
                "needs CUDA devices, found a CPU: Accelerate's FSDP 1 raises there, and its FSDP 2 quietly spreads nothing"
            )
        ranks = context.world_size
        if ranks == 1:
            return Decision.skip("one rank has nothing to spread: start one for each of several GPUs (--processes auto)")
        gathered = "for each pass" if self.options.reshard_after_forward else "once a micro-batch"
        met = "once a step" if self.options.reduce == "step" else "once a micro-batch"
        return Decision.apply(
            f"weights, gradients and optimizer state over {ranks} ranks; layers gathered {gathered}, gradients reduced {met}"
        )

    def apply(self, recipe: Recipe, context: Context) -> None:
        recipe.process.append(environment_kept)
        recipe.accelerator["fsdp_plugin"] = partial(accelerate_plugin, self.options.reshard_after_forward)
        recipe.engine = partial(make_engine, self.options.reduce)

    def memory(self, spec: MemorySpec, context: Context) -> None:
        part = 1 / context.world_size
        spec.stand_ins["engine"] = partial(make_stand_in, self.options.reshard_after_forward)
        spec.held |= {"weights": part, "optimizer_state": part, "update": part}
        if self.options.reduce == "micro_batch":
            spec.held["gradients"] = part

    @classmethod
    def memory_options(cls, options: Any | None, context: Context) -> list[MemoryOption]:
        if context.hardware.device_type == "cpu" or context.world_size == 1:
            return []
        if options is None:
            return [MemoryOption(cls.Options(), 1.1, "weights, gradients and state spread over the ranks")]
        if options == cls.Options():
            return []
        return [MemoryOption(cls.Options(), 1.1, "gathers every layer twice, reduces after each micro-batch")]

    def evidence(self, run: RunView) -> Evidence:
        from torch.distributed.fsdp import FSDPModule
        from torch.distributed.tensor import DTensor

        parameters = list(run.inner_model.parameters())
        units = sum(isinstance(module, FSDPModule) for module in run.inner_model.modules())
        shards = [p for p in parameters if isinstance(p, DTensor)]
        here, whole = sum(p.to_local().numel() for p in shards), sum(p.numel() for p in parameters)
        gathered = run.observation.calls("FSDP::all_gather (")
        seen = (
            f"{units} modules sharded; this rank holds {here:,} of {whole:,} elements, in {len(shards)} of {len(parameters)} "
            f"tensors; {gathered} gatherings in step 1"
        )
        most = sum(ceil(p.shape[0] / run.world_size) * (p.numel() // p.shape[0]) for p in shards)  # split along the first axis
        stepped = all(isinstance(p, DTensor) for p in run.engine.parameters)
        spread = len(shards) == len(parameters) and here <= most and stepped and run.world_size > 1 and units > 1
        if not run.observation.operators and spread:
            return Evidence.unknown(f"{seen}; no operators were recorded")
        return Evidence.active(seen) if spread and gathered else Evidence.inactive(seen)
