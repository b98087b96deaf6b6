"""Prepares a bench: plans its variants and finds which of them run. Runs it in a temporary folder, and describes it."""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

from hwopt.memory.forecast.planner import plan_memory
from hwopt.memory.planned import resolve as resolve_plan
from hwopt.planning.inputs import Inputs, refuse_missing_data
from hwopt.planning.plan import Plan
from hwopt.system.cache import cache_folder
from hwopt.text import cut
from hwopt.trials.bench_rows import Bench
from hwopt.trials.benchmark import BenchEffort, BenchListener, Benchmark
from hwopt.trials.processes import launcher_for
from hwopt.trials.trial import MEMORY_KINDS, Variant
from hwopt.trials.variants import BASELINE, Contest, PlannedVariant, contest_of, planned_variants

PREFIX = "hwopt-bench-"


@dataclass(frozen=True)
class PreparedBench:
    """The variants of a bench, planned for this machine."""

    job: Path | None
    contest: Contest
    candidates: Sequence[PlannedVariant]

    def plan(self, name: str) -> Plan:
        """The plan of the baseline or the profile."""
        found = next(candidate.plan for candidate in self.candidates if candidate.name == name)
        assert found is not None
        return found

    def facts(self, effort: BenchEffort) -> dict[str, str]:
        """What was measured, on what, when."""
        plan, contest = self.plan(self.contest.profile.name), self.contest
        hardware, baseline = plan.hardware, contest.baseline
        same = baseline.profile == contest.profile.profile
        without = f"no plugins: fp32, {self.plan(BASELINE).batch.step} rows per step"
        amount = f"{effort.seconds:g} s of training" if effort.steps is None else f"{effort.steps} steps"
        changes = f" with {', '.join(contest.profile.assignments)}" if contest.profile.assignments else ""
        packages = [f"{name} {plan.software[name]}" for name in ("torch", "transformers", "accelerate") if name in plan.software]
        threads = f", {hardware.cpu_cores} cores" if hardware.device_type == "cpu" else ""
        return {
            "job": f"{plan.job_name}: {plan.model.architecture}, {plan.model.parameters / 1e6:,.1f} M parameters",
            "profile": plan.profile.name + changes,
            "baseline": without if same else baseline.profile,
            "machine": f"{hardware.name}{threads}",
            "versions": ", ".join([f"hwopt {version('hwopt')}", *packages, f"Python {platform.python_version()}"]),
            "measured": f"{datetime.now().astimezone():%Y-%m-%d}, up to {effort.rounds} rounds of {amount}, the order rotated",
        }


def prepare_bench(
    inputs: Inputs, job: Path | None, subject: Variant, against: str | None, progress: BenchListener
) -> PreparedBench:
    """The variants for `subject` (a profile, with assignments) against the profile `against` (see `contest_of`).

    Raises InputError, PluginError or DataError as `hwopt run` does.
    """

    def resolve(variant: Variant) -> Plan:
        progress.on_plan(variant.name)
        return resolve_plan(
            variant.profile, job, assignments=variant.assignments, memory_limit=variant.memory_limit, inputs=inputs
        )

    job_file = inputs.job(job, subject.assignments)
    refuse_missing_data(job_file)
    if subject.profile == "auto":
        name = resolve(subject).profile.name
        subject = replace(subject, profile=name) if name in inputs.files else subject
    contest = contest_of(subject, against, inputs, job_file)
    return PreparedBench(job, contest, planned_variants(contest, resolve, fit_problem))


def fit_problem(plan: Plan) -> str:
    """Why `plan` does not fit into the CUDA device, as predicted; "" if it fits, if that is unknown, and on a CPU."""
    if plan.hardware.device_type != "cuda":
        return ""
    memory = plan_memory(plan, cache_folder())
    if memory.fits is not False:
        return ""
    return f"predicted: {memory.highest_gib:.2f} GiB of {memory.free_gib - memory.reserve_gib:.2f} GiB"


def run_bench(prepared: PreparedBench, effort: BenchEffort, progress: BenchListener) -> tuple[Bench, BaseException | None]:
    """Measure the variants. Returns the bench, and the KeyboardInterrupt or SystemExit of a signal that ended it early."""
    device = prepared.plan(BASELINE).hardware.device_type
    ended: BaseException | None = None
    with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as folder:
        benchmark = Benchmark(prepared.job, prepared.candidates, effort, Path(folder), launcher_for(device), progress)
        try:
            benchmark.run()
        except (KeyboardInterrupt, SystemExit) as signal:
            ended = signal
    notes = ["interrupted: variants without a speed were not measured, the others in fewer rounds"] if ended else []
    profile = prepared.contest.profile
    notes += [cut(f"{profile.profile}: {note}", 300) for note in prepared.plan(profile.name).notes]
    return Bench(benchmark.rows(), prepared.facts(effort), MEMORY_KINDS.get(device, device), notes), ended
