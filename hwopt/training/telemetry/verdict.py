"""The verdict on a run: what limits its speed, the figure that shows it, and the one setting to change next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hwopt.config.aliases import option_for
from hwopt.training.run import Run

Limit = Literal["spilling", "throttled", "input-bound", "host-bound", "memory-bound", "compute-bound"]

SPILLS, THROTTLED, DATA_WAIT, DEVICE_WAITS = 0.1, 0.2, 0.1, 0.5
"""From these parts on (of log points, samples, time, sampled steps) the sign counts."""
IDLE_GPU_PERCENT = 70  # below this mean use a GPU waits for its host, if no step could be sampled
MEMORY_BUSY_PERCENT, GOOD_MFU = 60, 0.4  # the memory is busy most of the time, and the arithmetic units are not


@dataclass(frozen=True)
class Verdict:
    limit: Limit
    figure: str  # what shows it, with its unit
    next: str  # the one setting to change next, or what else to do

    def __str__(self) -> str:
        return f"{self.limit}: {self.figure}. Next: {self.next}"


def limit_of(figures: Mapping[str, Any]) -> tuple[Limit, str]:
    """(what limits a run, the figure that shows it), from the figures of `use`. The first sign in this order counts.

    Every figure may be missing: a CPU has none of a GPU, and NVML does not report all of them everywhere.
    """

    def part(name: str) -> float:
        return float(figures.get(name) or 0.0)

    if part("spilled_share") >= SPILLS:
        signs = " and ".join(figures.get("spill_signs") or ("unknown sign",))
        return "spilling", f"memory was short at {part('spilled_share'):.0%} of the log points: {signs}"
    if part("throttled_share") >= THROTTLED:
        reasons = ", ".join(sorted(figures.get("throttle_reasons") or ())) or "unknown reason"
        return "throttled", f"the GPU lowered its clock in {part('throttled_share'):.0%} of the samples ({reasons})"
    if part("data_wait_share") >= DATA_WAIT:
        return "input-bound", f"the loop waited {part('data_wait_share'):.0%} of the time for data"
    if not figures.get("cuda"):
        return "compute-bound", f"the CPU computed {1 - part('data_wait_share'):.0%} of the time"
    waits, used = figures.get("device_waits_share"), figures.get("gpu_percent")
    if waits is not None and waits >= DEVICE_WAITS:
        return "host-bound", f"the GPU waited for the host in {waits:.0%} of the sampled steps"
    if waits is None and used is not None and used < IDLE_GPU_PERCENT:
        return "host-bound", f"the GPU was used {used:.0f} % of the time, and data was ready"
    busy, mfu = figures.get("memory_busy_percent"), figures.get("mfu")
    if busy is not None and busy >= MEMORY_BUSY_PERCENT and (mfu is None or mfu < GOOD_MFU):
        reached = "" if mfu is None else f" at {mfu:.0%} of its peak arithmetic"
        return "memory-bound", f"the memory of the GPU was busy {busy:.0f} % of the time{reached}"
    shown = [f"the GPU was used {used:.0f} % of the time" if used is not None else "the GPU was not seen waiting"]
    return "compute-bound", ", ".join(shown + ([f"MFU {mfu:.0%}"] if mfu is not None else []))


@dataclass(frozen=True)
class VerdictInputs:
    """What the advice depends on."""

    cuda: bool
    workers: int
    cores: int  # of this rank
    rows: int  # of a micro-batch
    micro_batches: int  # of a step
    half_precision: bool
    compiled: bool
    graphs: bool  # whether CUDA graphs can be turned on: the passes are the loop's own, and so is the engine
    batch_option: str  # the option that sets `rows`


def advice(limit: Limit, settings: VerdictInputs) -> str:
    """The one setting to change for a run that `limit` bounds."""
    more_rows = f"{settings.batch_option} = {2 * settings.rows} (fewer, larger micro-batches)"
    compiled = f"{option_for('torch_compile')} (fewer kernel launches and less memory traffic)"
    half = option_for("mixed_precision")
    if limit == "spilling":
        return f"{settings.batch_option} = {max(1, settings.rows // 2)} (smaller micro-batches, the same rows a step)"
    if limit == "throttled":
        return "cool the GPU, or check its power supply. No setting of hwopt helps"
    if limit == "input-bound":
        workers = min(max(1, 2 * settings.workers), settings.cores - 1)
        if workers > settings.workers:
            return f"{option_for('dataloader_num_workers')} = {workers} (found {settings.workers}, {settings.cores} cores)"
        return f"more CPU cores ({settings.workers} workers on {settings.cores} cores)"
    if limit == "host-bound":
        if settings.micro_batches > 1:
            return more_rows
        graphs = f"{option_for('enable_cuda_graph')} (one launch for all kernels of a micro-batch)"
        return "nothing is left" if settings.compiled else graphs if settings.graphs else compiled
    if not settings.cuda:
        return "a GPU: no setting makes this CPU faster"
    if not settings.half_precision:
        return f'{half} = "auto" (half precision)'
    if limit == "memory-bound" and not settings.compiled:
        return compiled
    return "nothing: the GPU is used well"


def settings_of(run: Run) -> VerdictInputs:
    plan, recipe = run.plan, run.recipe
    ranks_here = run.world_size if run.device.type == "cpu" else min(run.world_size, plan.hardware.count)
    matmuls = run.observation.matmul_dtypes
    return VerdictInputs(
        cuda=run.device.type == "cuda",
        workers=int(recipe.loader.get("num_workers", 0)),
        cores=max(1, plan.hardware.cpu_cores // max(1, ranks_here)),
        rows=run.batch.train,
        micro_batches=run.batch.accumulation(run.world_size),
        half_precision=sum(matmuls.values()) > 2 * matmuls.get("float", 0),
        compiled=any(module._compiled_call_impl is not None for module in run.inner_model.modules()),
        graphs=recipe.forward_backward is None and recipe.engine is None,
        batch_option=plan.batch_option("train"),
    )


def verdict_of(figures: Mapping[str, Any], run: Run) -> Verdict:
    """The verdict on `run`, of which `figures` were measured."""
    limit, figure = limit_of(figures)
    return Verdict(limit, figure, advice(limit, settings_of(run)))
