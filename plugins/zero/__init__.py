"""ZeRO: shards optimizer state, gradients and weights over the ranks, or offloads them to host memory, with DeepSpeed.

Stage 1 shards the optimizer state and the fp32 masters, stage 2 also the gradients, stage 3 also the weights.
`offload = "optimizer"` moves optimizer state and update to the host; "parameters" (stage 3) moves the weights too. The update on
the CPU uses torch's fused AdamW, which is as fast as DeepSpeed's CPU Adam and needs no compiler.
With half precision DeepSpeed keeps half-precision weights and updates fp32 masters.
A step that ran out of memory cannot be run again, because the other ranks wait inside it.

Source: ZeRO, Rajbhandari et al. 2020 (arXiv:1910.02054); ZeRO-Offload, Ren et al. 2021 (arXiv:2101.06840).
Hardware: any. On a single device nothing is sharded, so only offload saves memory.
Cost: stage 3 gathers the weights twice per micro-batch; offload transfers gradients and weights and updates on the CPU.
Numerical effect: rounding.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any, ClassVar, Literal

from pydantic import model_validator

from hwopt import plugin as hw

Offload = Literal["none", "optimizer", "parameters"]
Level = Literal[0, 1, 2, 3]
STAGES: dict[Offload, tuple[Level, ...]] = {"none": (0, 1, 2, 3), "optimizer": (1, 2, 3), "parameters": (3,)}
COMBINATIONS = [(stage, offload) for offload, stages in STAGES.items() for stage in stages]
"""Stages and offloads that can be used together, cheapest first."""
BUCKET = 1 << 24
"""Elements that are reduced at once. DeepSpeed's default of 5e8 needs a gigabyte."""
OFFLOADED_BYTES = 18
"""Host memory per trained parameter: fp32 master, its gradient and AdamW's two moments, and the half-precision weight."""
LIVE = 1 << 26
"""Gathered elements that stage 3 keeps. DeepSpeed's default of 1e9 would keep a model of a billion parameters unsharded."""


def engine_config(stage: int, offload: Offload, pin_memory: bool) -> dict[str, Any]:
    """DeepSpeed's configuration without the values of the job, which the engine adds.

    `gradient_accumulation_steps` is 1, because the loop tells DeepSpeed which micro-batch is the last one of a step.
    """
    zero: dict[str, Any] = {
        "stage": stage,
        "reduce_bucket_size": BUCKET,
        "allgather_bucket_size": BUCKET,
        "overlap_comm": False,  # True needs two buckets
        "contiguous_gradients": True,
    }
    if offload != "none":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": pin_memory}
    if offload == "parameters":
        zero["offload_param"] = {"device": "cpu", "pin_memory": pin_memory}
    if stage == 3:
        zero |= {
            "stage3_max_live_parameters": LIVE,
            "stage3_max_reuse_distance": LIVE,
            "stage3_prefetch_bucket_size": BUCKET,
            "stage3_param_persistence_threshold": 10_000,
        }
    return {
        "gradient_accumulation_steps": 1,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # allow torch's fused AdamW on the CPU
    }


def deepspeed_plugin(config: dict[str, Any]) -> Any:
    """Accelerate's DeepSpeedPlugin, set so that the model is created without DeepSpeed, with the same random weights as usual."""
    from accelerate.utils import DeepSpeedPlugin

    plugin = DeepSpeedPlugin(hf_ds_config=deepcopy(config), zero3_init_flag=False)
    plugin.set_deepspeed_weakref = lambda: None  # otherwise transformers creates models in shards
    return plugin


@contextmanager
def process_group(device_type: str) -> Iterator[None]:
    """DeepSpeed's process group and environment variables within the block. Without a launcher this process is the only rank."""
    import torch

    if device_type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed prints that it looked for a GPU
    from unittest import mock

    import torch.distributed as dist
    from deepspeed.comm import comm
    from deepspeed.utils import groups, logger

    single_rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # any port
    level, linear = logger.level, torch.nn.functional.linear
    logger.setLevel("ERROR")
    # Accelerate uses DeepSpeed only if the environment says so and does not ask for a CPU. It refuses a config beside the
    # settings of a launcher, although the plan has checked that they agree
    with mock.patch.dict(os.environ, {"ACCELERATE_USE_DEEPSPEED": "true"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.distributed.* is deprecated", FutureWarning)  # DeepSpeed calls them
        os.environ.update({} if "RANK" in os.environ else single_rank)
        for name in ("ACCELERATE_USE_CPU", "ACCELERATE_CONFIG_DS_FIELDS"):
            os.environ.pop(name, None)
        if device_type == "cpu":  # gloo does not need DeepSpeed's own kernel, which takes 30 s to compile
            import deepspeed.ops

            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        else:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        try:
            yield
        finally:
            logger.setLevel(level)
            torch.nn.functional.linear = linear  # stage 3 replaces it and never restores it
            groups._release_process_group_references()  # another run in this process creates its own group
            comm.cdb = None
            if dist.is_initialized():  # left by a run whose build failed
                dist.destroy_process_group()


class Zero(hw.Plugin):
    name = "zero"
    stage = hw.Stage.DISTRIBUTION
    effect = "rounding"
    relations = hw.Relations(
        conflicts=(hw.Conflict(field="engine", why="both shard the same tensors over the ranks; keep one of the two tables"),)
    )
    aliases: ClassVar[Mapping[str, str]] = {"deepspeed": "enabled = true", "zero_stage": "stage", "zero_offload": "offload"}

    class Options(hw.PluginOptions):
        stage: Literal["auto"] | Level = "auto"
        """ZeRO stage; 0: off; "auto": the cheapest that fits according to the memory plan."""
        offload: Literal["auto", "none", "optimizer", "parameters"] = "auto"
        """What is kept in host memory; "parameters" includes the optimizer and needs stage 3."""

        @model_validator(mode="after")
        def require_combination(self) -> Zero.Options:
            if not combinations(self.stage, self.offload):
                raise ValueError(
                    f'offload = "{self.offload}" cannot be used with stage = {self.stage}: '
                    '"optimizer" needs stage 1 to 3, "parameters" needs stage 3. Change or remove one of the two'
                )
            return self

    options: Options

    @property
    def traits(self) -> hw.Traits:
        lacks = ["whole_gradients", "whole_parameters", "packed_weights", "retry"]
        if self.options.stage == 3:
            lacks += ["whole_weights", "whole_graph"]
        if self.options.offload != "none":
            lacks.append("device_update")
        return hw.Traits(lacks=tuple(lacks))

    def probe(self, context: hw.Context) -> hw.Decision:
        if not context.has("deepspeed"):
            return hw.Decision.skip("DeepSpeed is not installed (pip install 'hwopt[deepspeed]')")
        options = self.options
        if "auto" in (options.stage, options.offload):
            note = "; on one device nothing is sharded, only offload saves memory" if context.world_size == 1 else ""
            found = useful_combinations(options.stage, options.offload, context.world_size)
            candidates = [options.changed(stage=stage, offload=offload) for stage, offload in found]
            if len(candidates) == 1:
                return hw.Decision.apply(f"the only possible combination{note}", candidates[0])
            return hw.Decision.choose(candidates, f"the cheapest of {len(candidates)} combinations that fits{note}")
        return hw.Decision.apply(self.describe(context))

    def describe(self, context: hw.Context) -> str:
        stage, offload, ranks = self.options.stage, self.options.offload, context.world_size
        sharded = ("nothing", "optimizer state", "optimizer state and gradients", "optimizer state, gradients and weights")
        where = {"none": "", "optimizer": "; optimizer in host memory", "parameters": "; optimizer and weights in host memory"}
        text = f"stage {stage}: shards {sharded[int(stage)]} over {ranks} rank(s){where[offload]}"
        if ranks == 1 and offload == "none" and stage != 0:
            text += "; on one device that saves nothing: set offload, or start more ranks"
        return text

    def apply(self, recipe: hw.Recipe, context: hw.Context) -> None:
        stage, offload = self.options.stage, self.options.offload
        assert stage != "auto" and offload != "auto", "probe() replaces it"  # noqa: PT018
        if stage == 0:
            return
        cuda = context.hardware.device_type == "cuda"
        config = engine_config(stage, offload, pin_memory=cuda)
        recipe.process.append(partial(process_group, context.hardware.device_type))
        recipe.accelerator["deepspeed_plugin"] = partial(deepspeed_plugin, config)
        recipe.accelerator["cpu"] = False  # True selects data parallelism; without a GPU the device is the CPU anyway
        if not cuda:
            gloo = partial(hw.Lazy("accelerate.utils:InitProcessGroupKwargs"), backend="gloo")
            recipe.accelerator["kwargs_handlers"].append(gloo)
        recipe.engine = hw.Lazy("hwopt_plugins.zero.engine:ZeroEngine")

    def memory(self, spec: hw.MemorySpec, context: hw.Context) -> None:
        stage, offload = int(self.options.stage), self.options.offload
        if stage == 0:
            return
        on_host = context.hardware.device_type != "cpu"  # the memory of a CPU device is host memory
        stand_in = hw.Lazy("hwopt_plugins.zero.stand_in:ZeroStandIn")
        spec.stand_ins["engine"] = partial(
            stand_in, bucket=BUCKET, stage=stage, ranks=context.world_size, offload=offload != "none", host=not on_host
        )
        spec.weight_bytes = spec.gradient_bytes = spec.frozen_bytes  # all are in the precision of the passes
        spec.master_bytes = 4.0
        if on_host and offload != "none":
            spec.host += OFFLOADED_BYTES * spec.trained / context.world_size
        if stage == 3:
            kept = 0.0 if on_host and offload == "parameters" else 1 / context.world_size
            spec.held["weights"] = kept
            if kept < 1:  # gathered weights: at least the largest one, the embedding. A single rank uses its own in place
                largest = context.model.vocab_size * context.model.hidden_size
                spec.buffers += spec.weight_bytes * min(spec.parameters, max(LIVE, largest) + BUCKET)

    @classmethod
    def alternatives(cls, options: Any | None, context: hw.Context) -> list[hw.Scale]:
        if not cls(cls.Options()).probe(context).options:
            return []
        offers: dict[tuple[Level, Offload], tuple[float, str]] = {
            (3, "parameters"): (4.0, "keeps weights in host memory and transfers each one for use"),
            (2, "optimizer"): (2.0, "keeps the optimizer in host memory and updates on the CPU"),
        }
        if context.hardware.unified_memory:
            offers = {}
        if context.world_size > 1:
            offers[2, "none"] = (1.05, "shards state and gradients over the ranks")
        now: Any = (0, "none") if options is None else (options.stage, options.offload)
        time, _ = offers.get(now, (1.0, ""))
        choices = [
            hw.Choice(changes={"stage": stage, "offload": offload}, note=note, time=time)
            for (stage, offload), (time, note) in offers.items()
            if COMBINATIONS.index((stage, offload)) > COMBINATIONS.index(now)
        ]
        present = hw.OFF if options is None else hw.Choice(changes=options.model_dump(), time=time)
        return [hw.Scale(choices=(*choices, present), present=len(choices))] if choices else []

    def evidence(self, run: hw.RunView) -> hw.Evidence:
        kind = type(run.model).__name__
        if kind != "DeepSpeedEngine":
            return hw.Evidence.active(f"the model runs in {kind} with {type(run.engine).__name__}", stage=0)
        optimizer, (local, total) = run.model.optimizer, run.engine.sizes()  # type: ignore[attr-defined]
        stage = stage_of(optimizer)
        devices = sorted({tensor.device.type for tensor in run.engine.parameters})
        whole = [name for name, p in run.inner_model.named_parameters() if stage == 3 and not hasattr(p, "ds_tensor")]
        seen = (
            f"{type(optimizer).__name__} of DeepSpeed, stage {stage}; this rank updates {local:,} of {total:,} trained elements "
            f"on {'/'.join(devices)}"
        )
        seen += f"; {len(whole)} weights are not partitioned: {hw.first_names(whole)}" if whole else ""
        shares = local <= total / run.world_size + 1024 * run.world_size  # partitions are padded
        found = {"stage": stage, "optimizer_on": "/".join(devices)}
        return hw.Evidence.of(shares and not whole, seen, **found)

    def expects(self) -> Mapping[str, Any]:
        if self.options.stage == 0:
            return {"stage": 0}
        on_host = {} if self.options.offload == "none" else {"optimizer_on": "cpu"}
        return {"stage": self.options.stage, **on_host}


def stage_of(optimizer: Any) -> int:
    """The ZeRO stage of DeepSpeed's `optimizer`, from what it does with gradients and weights; 0 for another optimizer."""
    if getattr(optimizer, "fp32_partitioned_groups_flat", None) is not None:
        return 3
    if getattr(optimizer, "single_partition_of_fp32_groups", None) is None:
        return 0
    return 2 if optimizer.partition_gradients else 1


def combinations(stage: Any, offload: Any) -> list[tuple[Level, Offload]]:
    """The COMBINATIONS that match `stage` and `offload`, cheapest first."""
    return [(s, o) for s, o in COMBINATIONS if stage in ("auto", s) and offload in ("auto", o)]


def useful_combinations(stage: Any, offload: Any, world_size: int) -> list[tuple[Level, Offload]]:
    """The matching combinations without those that save no more memory than a cheaper one; all of them if none is left."""
    found = combinations(stage, offload)
    if world_size > 1:
        return [c for c in found if c != (1, "optimizer")] or found
    one_device = [(0, "none"), (2, "optimizer"), (3, "parameters")]
    return [c for c in found if c in one_device] or found
