"""ZeRO: optimizer state, gradients and weights spread over the ranks, or kept in the host's memory, by DeepSpeed.

Source: Rajbhandari et al. 2020, ZeRO (arXiv:1910.02054); Ren et al. 2021, ZeRO-Offload (arXiv:2101.06840); made by DeepSpeed
through Accelerate. Stage 1 spreads the optimizer's state and the fp32 masters, 2 the gradients too, 3 the weights too.
`offload` moves the update to the host's memory and CPU ("optimizer"), with stage 3 the weights as well ("parameters").
Hardware: any; on a single device nothing is spread, so that only offload saves memory. Cost: stage 3 gathers the weights twice
a micro-batch; offload moves gradients and weights over the bus and updates on the CPU, with torch's fused AdamW, which is as
fast there as DeepSpeed's own and needs no compiler. Under half precision DeepSpeed keeps half weights and steps on fp32 masters.
Numerical effect: rounding. No step can be begun again after an out-of-memory: the other ranks wait inside of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from hwopt.plugin import (
    Conflict,
    Context,
    Decision,
    Evidence,
    MemoryOption,
    MemorySpec,
    Plugin,
    PluginOptions,
    Recipe,
    RunView,
    Stage,
)
from hwopt_plugins.zero.process import process_group

Offload = Literal["none", "optimizer", "parameters"]
Level = Literal[0, 1, 2, 3]
COMBINATIONS: tuple[tuple[Level, Offload], ...] = (  # cheapest first
    (0, "none"),
    (1, "none"),
    (2, "none"),
    (3, "none"),
    (1, "optimizer"),
    (2, "optimizer"),
    (3, "optimizer"),
    (3, "parameters"),
)
BUCKET = 1 << 24
"""Elements that are reduced at once; DeepSpeed's 5e8 are a gigabyte."""
OFFLOADED_BYTES = 18
"""In the host's memory, of a trained parameter: masters, their gradients and AdamW's two moments in fp32, its weight in half."""
LIVE = 1 << 26
"""Elements of gathered weights that stage 3 keeps; DeepSpeed's 1e9 would hold a model of a billion parameters whole."""


def engine_config(stage: int, offload: Offload, pin_memory: bool) -> dict[str, Any]:
    """DeepSpeed's configuration but for the job's part of it, which the engine fills in.

    The loop says itself which micro-batch is the last one of a step: there is nothing for DeepSpeed to count.
    """
    zero: dict[str, Any] = {
        "stage": stage,
        "reduce_bucket_size": BUCKET,
        "allgather_bucket_size": BUCKET,
        "overlap_comm": False,  # two buckets instead of one
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
        "zero_force_ds_cpu_optimizer": False,  # torch's fused AdamW runs on the CPU too
    }


def accelerate_plugin(config: dict[str, Any]) -> Any:
    """Accelerate's DeepSpeedPlugin, which leaves the making of the model alone (weights are random in the same way as ever)."""
    import copy

    from accelerate.utils import DeepSpeedPlugin

    plugin = DeepSpeedPlugin(hf_ds_config=copy.deepcopy(config), zero3_init_flag=False)
    plugin.set_deepspeed_weakref = lambda: None  # transformers would build every model in shards
    return plugin


def backend_of_hosts() -> Any:
    from accelerate.utils import InitProcessGroupKwargs

    return InitProcessGroupKwargs(backend="gloo")


def make_engine(run: RunView) -> Any:
    from hwopt_plugins.zero.engine import ZeroEngine

    return ZeroEngine(run)


def make_stand_in(run: RunView, **settings: Any) -> Any:
    from hwopt_plugins.zero.stand_in import StandIn

    return StandIn(run, **settings)


class Zero(Plugin):
    name = "zero"
    stage = Stage.DISTRIBUTION
    preserves = "rounding"
    conflicts = (Conflict(field="engine", why="each of them spreads the same tensors over the ranks; keep one of them"),)
    aliases: ClassVar[Mapping[str, str]] = {
        "deepspeed": "enabled = true",
    }

    class Options(PluginOptions):
        stage: Literal["auto"] | Level = Field(
            default="auto", description='What is spread; "auto": the cheapest that the memory plan says will fit; 0: nothing.'
        )
        offload: Literal["auto", "none", "optimizer", "parameters"] = Field(
            default="auto", description="What lies in the host's memory; parameters: with stage 3 alone, and the optimizer too."
        )

        @model_validator(mode="after")
        def possible(self) -> Zero.Options:
            if not combinations(self.stage, self.offload):
                raise ValueError(
                    f'offload = "{self.offload}" does not go with stage = {self.stage}: '
                    "optimizer needs stage 1 to 3, parameters needs stage 3; or leave one of the two out"
                )
            return self

    options: Options

    @property
    def lacks(self) -> tuple[str, ...]:
        found = ["whole_gradients", "whole_parameters", "packed_weights", "retry"]
        if self.options.stage == 3:
            found += ["whole_weights", "whole_graph"]
        return (*found, "device_update") if self.options.offload != "none" else tuple(found)

    def probe(self, context: Context) -> Decision:
        if not context.has("deepspeed"):
            return Decision.skip("DeepSpeed is not installed: pip install 'hwopt[deepspeed]'")
        given = self.options
        if "auto" in (given.stage, given.offload):
            alone = "; on one device nothing is spread, so that only offload saves memory" if context.world_size == 1 else ""
            chosen = [self.Options(stage=s, offload=o) for s, o in sensible(given.stage, given.offload, context.world_size)]
            if len(chosen) == 1:
                return Decision.apply(f"the one combination that is left{alone}", chosen[0])
            return Decision.choose(chosen, f"the cheapest of {len(chosen)} that fits{alone}")
        return Decision.apply(self.told(context))

    def told(self, context: Context) -> str:
        stage, offload, ranks = self.options.stage, self.options.offload, context.world_size
        spread = {
            0: "nothing",
            1: "optimizer state",
            2: "optimizer state and gradients",
            3: "optimizer state, gradients and weights",
        }
        where = {"none": "", "optimizer": "; the optimizer in the host's memory", "parameters": "; all in the host's memory"}
        said = f"stage {stage}: {spread[int(stage)]} over {ranks} rank(s){where[offload]}"
        if ranks == 1 and offload == "none" and stage != 0:
            said += "; on one device that saves nothing: set offload, or more ranks"
        return said

    def apply(self, recipe: Recipe, context: Context) -> None:
        stage, offload = self.options.stage, self.options.offload
        assert stage != "auto", "probe() has it chosen"
        assert offload != "auto", "probe() has it chosen"
        if stage == 0:
            return
        cuda = context.hardware.device_type == "cuda"
        config = engine_config(stage, offload, pin_memory=cuda)
        recipe.process.append(partial(process_group, context.hardware.device_type))
        recipe.accelerator["deepspeed_plugin"] = partial(accelerate_plugin, config)
        recipe.accelerator["cpu"] = False  # or it would quietly be data parallel; the device is the machine's all the same
        if not cuda:
            recipe.accelerator["kwargs_handlers"].append(backend_of_hosts)
        recipe.engine = make_engine

    def memory(self, spec: MemorySpec, context: Context) -> None:
        stage, offload = int(self.options.stage), self.options.offload
        if stage == 0:
            return
        on_host = context.hardware.device_type != "cpu"  # a CPU's own memory is the host's
        spec.stand_ins["engine"] = partial(
            make_stand_in,
            stage=stage,
            ranks=context.world_size,
            offload=offload != "none",
            host=not on_host,
            bucket=BUCKET,
        )
        spec.master_bytes = 4.0
        if on_host and offload != "none":
            spec.host += OFFLOADED_BYTES * spec.trained / context.world_size
        if stage == 3:
            kept = 0.0 if on_host and offload == "parameters" else 1 / context.world_size
            spec.held["weights"] = kept
            # gathered while they are used, at least the largest, which is the embedding
            largest = context.model.vocab_size * context.model.hidden_size
            gathers = context.world_size > 1 or kept == 0
            spec.buffers += spec.weight_bytes * min(spec.parameters, max(LIVE, largest) + BUCKET if gathers else largest)

    @classmethod
    def memory_options(cls, options: Any | None, context: Context) -> list[MemoryOption]:
        if not cls(cls.Options()).probe(context).options:
            return []
        costs = {
            (2, "optimizer"): MemoryOption(
                cls.Options(stage=2, offload="optimizer"), 2.0, "updates in the host's memory, on the CPU"
            ),
            (3, "parameters"): MemoryOption(
                cls.Options(stage=3, offload="parameters"), 4.0, "weights come over the bus as they are used"
            ),
        }
        if context.world_size > 1:
            spread = MemoryOption(cls.Options(stage=2, offload="none"), 1.05, "state and gradients spread over the ranks")
            costs = {(2, "none"): spread, **costs}
        now = (0, "none") if options is None else (options.stage, options.offload)
        order = [*COMBINATIONS]
        return [leaner for combination, leaner in costs.items() if order.index(combination) > order.index(now)]  # type: ignore[arg-type]

    def evidence(self, run: RunView) -> Evidence:
        stage, engine = self.options.stage, run.model
        if stage == 0:
            kind = type(run.engine).__name__
            return Evidence.active(f"not needed: the plan fits without; the engine is {kind}")
        kind = type(engine).__name__
        if kind != "DeepSpeedEngine":
            return Evidence.inactive(f"the model runs in {kind} instead of DeepSpeedEngine")
        found = engine.zero_optimization_stage()
        spread, whole = run.engine.sizes()
        devices = sorted({tensor.device.type for tensor in run.engine.parameters})
        seen = (
            f"DeepSpeedEngine, stage {found}; this rank steps on {spread:,} of {whole:,} trained elements, on {'/'.join(devices)}"
        )
        offloaded = self.options.offload == "none" or devices == ["cpu"]
        enough = spread <= whole / run.world_size + 1024 * run.world_size  # partitions are padded
        return Evidence.active(seen) if found == stage and offloaded and enough else Evidence.inactive(seen)


def combinations(stage: Any, offload: Any) -> list[tuple[Level, Offload]]:
    """Those that agree with what is given, the cheapest first."""
    return [(s, o) for s, o in COMBINATIONS if stage in ("auto", s) and offload in ("auto", o)]


def sensible(stage: Any, offload: Any, world_size: int) -> list[tuple[Level, Offload]]:
    """Without those that a cheaper one equals: on one device a stage without offload, and stages that only spread."""
    found = combinations(stage, offload)
    if world_size > 1:
        return [c for c in found if c != (1, "optimizer")] or found
    alone = [(0, "none"), (2, "optimizer"), (3, "parameters")]
    return [c for c in found if c in alone] or found
