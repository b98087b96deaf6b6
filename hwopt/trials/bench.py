"""A bench: plans its variants, measures those that run, and describes what was measured."""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path

from hwopt.memory.forecast.planner import plan_memory
from hwopt.memory.planned import resolve as resolve_plan
from hwopt.planning.inputs import Inputs, refuse_missing_data
from hwopt.planning.plan import Plan
from hwopt.system.cache import cache_folder
from hwopt.text import cut, millions
from hwopt.trials.benchmark import Bench, BenchEffort, Benchmark
from hwopt.trials.trial import MEMORY_KINDS, TrialProgress, Variant, launching
from hwopt.trials.variants import BASELINE, planned_variants, variants_of


def run_bench(
    inputs: Inputs, job: Path | None, subject: Variant, against: str | None, effort: BenchEffort, progress: TrialProgress
) -> tuple[Bench, BaseException | None]:
    """Measure `subject` (a profile, with assignments) against the profile `against` (see `variants_of`), plugin by plugin.

    Returns the bench, and the KeyboardInterrupt or SystemExit of a signal that ended it early. Raises InputError, PluginError or
    DataError as `hwopt run` does.
    """

    def resolve(variant: Variant) -> Plan:
        progress.show(f"planning {variant.name}")
        return resolve_plan(
            variant.profile, job, assignments=variant.assignments, memory_limit=variant.memory_limit, inputs=inputs
        )

    job_file = inputs.job(job, subject.assignments)
    refuse_missing_data(job_file)
    if subject.profile == "auto":
        name = resolve(subject).profile.name
        subject = replace(subject, profile=name) if name in inputs.files else subject
    candidates = planned_variants(variants_of(subject, against, inputs, job_file), resolve, fit_problem)
    plans = {each.name: each.plan for each in candidates if each.plan is not None}
    plan, device = plans[subject.name], plans[BASELINE].hardware.device_type
    ended: BaseException | None = None
    with tempfile.TemporaryDirectory(prefix="hwopt-bench-", ignore_cleanup_errors=True) as folder:
        benchmark = Benchmark(job, candidates, effort, Path(folder), partial(launching, device), progress)
        try:
            benchmark.run()
        except (KeyboardInterrupt, SystemExit) as signal:
            ended = signal
    notes = ["interrupted: variants without a speed were not measured, the others in fewer rounds"] if ended else []
    notes += [cut(f"{subject.profile}: {note}", 300) for note in plan.notes]
    measured = facts(subject, candidates[0].variant.profile, plans, effort)
    return Bench(benchmark.rows(), measured, MEMORY_KINDS.get(device, device), notes), ended


def facts(subject: Variant, baseline: str, plans: Mapping[str, Plan], effort: BenchEffort) -> dict[str, str]:
    """What was measured, on what, when. `baseline`: the profile of the baseline."""
    plan, assignments = plans[subject.name], subject.assignments
    hardware = plan.hardware
    without = f"no plugins: fp32, {plans[BASELINE].batch.step} rows per step"
    amount = f"{effort.seconds:g} s of training" if effort.steps is None else f"{effort.steps} steps"
    packages = [f"{name} {plan.software[name]}" for name in ("torch", "transformers", "accelerate") if name in plan.software]
    return {
        "job": f"{plan.job_name}: {plan.model.architecture}, {millions(plan.model.parameters)} parameters",
        "profile": plan.profile.name + (f" with {', '.join(assignments)}" if assignments else ""),
        "baseline": without if baseline == subject.profile else baseline,
        "machine": hardware.name + (f", {hardware.cpu_cores} cores" if hardware.device_type == "cpu" else ""),
        "versions": ", ".join([f"hwopt {version('hwopt')}", *packages, f"Python {platform.python_version()}"]),
        "measured": f"{datetime.now().astimezone():%Y-%m-%d}, up to {effort.rounds} rounds of {amount}, the order rotated",
    }


def fit_problem(plan: Plan) -> str:
    """Why `plan` does not fit into the CUDA device, as predicted; "" if it fits, if that is unknown, and on a CPU."""
    if plan.hardware.device_type != "cuda":
        return ""
    memory = plan_memory(plan, cache_folder())
    if memory.fits is not False:
        return ""
    return f"predicted: {memory.highest_gib:.2f} GiB of {memory.free_gib - memory.reserve_gib:.2f} GiB"
