"""Data loading: worker processes prepare step batches ahead of time, and pinned memory speeds up the copy to the GPU.

Workers load and collate data while the model computes. A batch in pinned (page-locked) memory is copied without blocking the
host.

Source: https://docs.pytorch.org/docs/stable/data.html#memory-pinning and #multi-process-data-loading.
Hardware: one core per worker; pinning needs a CUDA device.
Cost: about 0.3 GiB of host memory per worker, plus `prefetch_factor` step batches each.
Numerical effect: none. The sampler alone decides the order of the samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from hwopt import plugin as hw
from hwopt.hardware.device import Hardware

NUMBERS = (0, 1, 2, 3, 4, 6, 8, 12, 16)
"""Values of `num_workers` that are worth a trial."""
MAX_WORKERS = 4  # tokenized text is cheap to collate: more workers only use more memory


def cores_of_a_rank(hardware: Hardware, world_size: int) -> int:
    """The number of CPU cores per rank on this machine."""
    here = world_size if hardware.device_type == "cpu" else min(world_size, hardware.count)
    return max(1, hardware.cpu_cores // max(1, here))


class Dataloader(hw.Plugin):
    name = "dataloader"
    stage = hw.Stage.DATA
    effect = "bits"
    aliases: ClassVar[Mapping[str, str]] = {
        "dataloader_num_workers": "num_workers",
        "dataloader_pin_memory": "pin_memory",
        "dataloader_prefetch_factor": "prefetch_factor",
        "dataloader_persistent_workers": "persistent_workers",
    }

    class Options(hw.PluginOptions):
        num_workers: Literal["auto"] | Annotated[int, Field(ge=0)] = "auto"
        """Worker processes per rank, or "auto"."""
        pin_memory: Literal["auto"] | bool = "auto"
        """Use page-locked host memory; "auto": on CUDA devices."""
        prefetch_factor: int = Field(default=2, gt=0)
        """Step batches that each worker prepares ahead."""
        persistent_workers: bool = True
        """Keep workers alive between epochs."""
        multiprocessing_context: Literal["fork", "spawn", "forkserver"] | None = None
        """How workers are started; default: Python's default on this system."""

    options: Options

    def probe(self, context: hw.Context) -> hw.Decision:
        options, hardware = self.options, context.hardware
        cores, cuda = cores_of_a_rank(hardware, context.world_size), hardware.device_type == "cuda"
        few = min(MAX_WORKERS, cores - 1) if cores > 2 else 0  # one core is left to the training process
        workers = few if options.num_workers == "auto" else options.num_workers
        pinned = cuda and not hardware.unified_memory if options.pin_memory == "auto" else options.pin_memory
        start, reasons = options.multiprocessing_context, []
        where = "pinned" if pinned else "not pinned"
        text = f"{hw.counted(workers, 'worker')} for {hw.counted(cores, 'core')} a process, {where}"
        if workers > cores and hardware.source == "described":
            text = f"{hw.counted(workers, 'worker')}, {where}; "
            text += f"they need {workers} cores a process, which this machine does not have ({cores})"
        elif workers > cores:
            reasons.append(f"{workers} workers need {workers} cores, a rank has {cores}")
            workers = cores
        if pinned and not hardware.can("offload"):
            pinned = False
            reasons.append(f"pinning: {hardware.can('offload').reason}")
        if hardware.system == "Windows" and start in ("fork", "forkserver"):
            reasons.append(f"Windows cannot start processes by {start!r}, only by 'spawn'")
            start = "spawn"
        to = options.changed(num_workers=workers, pin_memory=pinned, multiprocessing_context=start)
        if reasons:
            return hw.Decision.fallback(to, f"{'; '.join(reasons)}; {hw.counted(workers, 'worker')}")
        return hw.Decision.apply(text, to)

    def apply(self, recipe: hw.Recipe, context: hw.Context) -> None:
        settings = self.options.model_dump(exclude_none=True)
        assert "auto" not in settings.values(), "probe() replaces it"
        # torch rejects the other settings without workers
        without_workers = {"num_workers": 0, "pin_memory": self.options.pin_memory}
        recipe.loader.update(settings if self.options.num_workers else without_workers)

    @classmethod
    def alternatives(cls, options: Any | None, context: hw.Context) -> list[hw.Scale]:
        """The number of workers up to the cores of a rank, and what each prepares ahead."""
        if options is None:
            return []
        cores, workers = cores_of_a_rank(context.hardware, context.world_size), options.num_workers
        scales = [scale("num_workers", {n for n in NUMBERS if n <= cores}, workers, parallel=True)]
        return [*scales, scale("prefetch_factor", {2, 4, 8}, options.prefetch_factor)] if workers else scales

    def evidence(self, run: hw.RunView) -> hw.Evidence:
        loader, pinned = run.train_loader, run.last_step_batch.pinned
        # a loader keeps its iterator only if its workers are persistent
        alive = [worker for worker in getattr(getattr(loader, "_iterator", None), "_workers", ()) if worker.is_alive()]
        seen = f"num_workers {loader.num_workers}, {len(alive)} alive, the last step came from memory that is "
        seen += "pinned" if pinned else "not pinned"
        if loader.num_workers:
            seen += f"; prefetch_factor {loader.prefetch_factor}, persistent_workers {loader.persistent_workers}"
        workers = len(alive) if loader.persistent_workers else loader.num_workers
        return hw.Evidence.active(seen, num_workers=workers, pinned=pinned)

    def expects(self) -> Mapping[str, Any]:
        return {"num_workers": self.options.num_workers, "pinned": self.options.pin_memory}


def scale(option: str, values: set[int], present: int, parallel: bool = False) -> hw.Scale:
    """The choices of an option of the workers, with the `present` one."""
    ordered = sorted(values | {present})
    choices = tuple(hw.Choice(changes={option: value}) for value in ordered)
    return hw.Scale(choices=choices, present=ordered.index(present), input=True, parallel=parallel, tune=True)
