"""Compares the claims of a profile with what its plan predicts, or with what a run measured.

A claim is confirmed if its range and the found range overlap, and refuted if they do not. What a plan cannot predict is not
measurable here. Memory may differ by the forecast's error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache as memoized
from pathlib import Path
from typing import Literal

from hwopt.config.claim import Claim
from hwopt.memory.dry_run import memory_spec
from hwopt.memory.planner import context_gib, highest_gib, on_one_device
from hwopt.memory.reference import reference_memory, reference_plan
from hwopt.memory.roofline import product_seconds, update_seconds
from hwopt.memory.tracer import trace_plan
from hwopt.planning.inputs import Inputs
from hwopt.planning.memory_plan import MemoryPlan
from hwopt.planning.plan import Plan

Verdict = Literal["confirmed", "refuted", "not measurable here"]

MEMORY_ERROR = 0.07
"""Largest error of the forecast of reserved memory on published runs (docs/memory.md)."""
MEMORY_KINDS = ("peak_memory_gib", "eval_memory_gib", "free_memory_gib", "activations_gib")
"""Quantities with the error of a traced forecast. Weights, gradients and states are counted exactly."""

UNPREDICTED = {
    "gpu_utilization": "a plan predicts no utilization: measure it on the card",
    "cpu_utilization": "a plan predicts no utilization: measure it on the machine",
    "eval_f1": "a plan predicts no score: train on the author's data, which are not published",
    "attention_seconds": "a plan predicts no time of single kernels: measure it on the card",
    "eval_samples_per_second": "a plan predicts no time of an evaluation: measure it on the card",
}
"""Quantity -> why a plan cannot say it."""


@dataclass(frozen=True)
class Found:
    """A quantity as predicted or measured: the lowest and the highest value, and how it was found."""

    low: float
    high: float
    basis: Literal["predicted", "measured"]
    on: str
    """The model, the rows and the device."""


@dataclass(frozen=True)
class Finding:
    """A claim of a profile, with what was found and the verdict."""

    profile: str
    claim: Claim
    found: Found | None
    verdict: Verdict
    explanation: str


def judge(profile: str, claim: Claim, found: Found | None, why_not: str = "") -> Finding:
    """The verdict on `claim`. `why_not` explains why nothing was found."""
    if found is None:
        return Finding(profile, claim, None, "not measurable here", why_not or "nothing was found")
    error = MEMORY_ERROR if claim.what in MEMORY_KINDS and not claim.is_ratio and found.basis == "predicted" else 0.0
    low, high = sorted((found.low * (1 - error), found.high * (1 + error)))
    agrees = low <= claim.high * (1 + 1e-9) and claim.low * (1 - 1e-9) <= high
    return Finding(profile, claim, found, "confirmed" if agrees else "refuted", claim.note)


def explain(finding: Finding, assumed: Sequence[str]) -> str:
    """The note of the claim, else what a refuting forecast rests on. `assumed`: what the source does not state."""
    claim = finding.claim
    if finding.explanation or finding.verdict == "confirmed":
        return finding.explanation
    if not claim.is_ratio and assumed:
        return f"the plan assumes the {' and the '.join(assumed)}, which the source does not state"
    if claim.what.endswith(("_seconds", "_per_second")):
        return "the forecast counts arithmetic, memory traffic and kernel launches; it does not count data loading"
    return "both sides from the plan" if claim.is_ratio else "from the plan"


class Forecast:
    """Predicts quantities from plans. Each plan is made once."""

    def __init__(self, inputs: Inputs, cache: Path, on_trial: Callable[[str], None] = lambda what: None) -> None:
        self.inputs, self.cache, self.on_trial = inputs, cache, on_trial
        self.planned = memoized(self._planned)

    def findings(self, profile: str) -> Iterator[Finding]:
        """The verdicts on all claims of `profile`, in its order."""
        for claim in self.inputs.profile(profile).content.claims:
            yield self.check(profile, claim)

    def check(self, profile: str, claim: Claim) -> Finding:
        """The verdict on one claim, by the plans of the profile and of its baseline."""
        if why := claim.missing or UNPREDICTED.get(claim.what, ""):
            return judge(profile, claim, None, why)
        plan, memory = self.planned(profile, claim.changes, claim.samples)
        own = self.quantity(claim, plan, memory)
        if own is None:
            return judge(profile, claim, None, no_forecast(claim, plan))
        if claim.is_ratio:
            base = self.quantity(claim, *self.planned(claim.against or profile, claim.against_changes, claim.samples))
            if base is None:
                return judge(profile, claim, None, f"no forecast of the baseline: {no_forecast(claim, plan)}")
            own = own[0] / base[0], own[1] / base[1]
        finding = judge(profile, claim, Found(min(own), max(own), "predicted", described(plan)))
        return replace(finding, explanation=explain(finding, plan.profile.content.tuned_for.assumed))

    def _planned(self, profile: str, changes: tuple[str, ...], samples: int | None) -> tuple[Plan, MemoryPlan]:
        self.on_trial(" ".join((profile, *changes)))
        plan = reference_plan(profile, self.inputs, self.cache, changes)
        return plan, reference_memory(plan, self.cache, samples=samples, with_largest=True)

    def quantity(self, claim: Claim, plan: Plan, memory: MemoryPlan) -> tuple[float, float] | None:
        """The predicted quantity, at the fast and at the slow end of the forecast if it is a time; None without a forecast."""
        if (value := memory_quantity(claim, plan, memory)) is not None:
            return value, value
        time = memory.time
        if time is None:
            return None
        rows = plan.batch.step
        match claim.what:
            case "samples_per_second":
                return rows / time.step[0], rows / time.step[1]
            case "steps_per_second":
                return 1 / time.step[0], 1 / time.step[1]
            case "epoch_seconds":
                return time.epoch
            case "total_seconds":
                return time.total
        trace = on_one_device(plan, trace_plan(plan, memory.width, 2, self.cache / "memory"))
        step = trace.train.at(memory.rows, memory.width)
        return update_seconds(plan, step) if claim.what == "update_seconds" else product_seconds(plan, step)


def memory_quantity(claim: Claim, plan: Plan, memory: MemoryPlan) -> float | None:
    """A size of the plan; None for a time."""
    context = context_gib(plan.hardware)
    match claim.what:
        case "peak_memory_gib":
            return memory.peak_gib if claim.memory == "allocator" else highest_gib(memory) + context
        case "eval_memory_gib":
            return None if memory.eval_peak_gib is None else memory.eval_peak_gib + context
        case "free_memory_gib":
            return memory.free_gib - highest_gib(memory) - context
        case "states_gib":
            return sum(memory.parts.get(kind, 0.0) for kind in ("weights", "gradients", "optimizer_state", "masters"))
        case "optimizer_state_gib":
            return memory.parts["optimizer_state"]
        case "activations_gib":
            return memory.parts["activations"]
        case "largest_train":
            return memory.largest_train
        case "rows_per_step":
            return plan.batch.step
        case "trained_parameters":
            return memory_spec(plan).trained
    return None


def no_forecast(claim: Claim, plan: Plan) -> str:
    """Why a plan has no forecast of the quantity."""
    if claim.what in ("epoch_seconds", "total_seconds") and plan.profile.content.tuned_for.samples is None:
        return "the source does not state the number of samples"
    return f"the profile states no peaks of {plan.hardware.name}"


def described(plan: Plan, device: str = "") -> str:
    """The model, the rows and the device; by default the card of the plan."""
    model = f"{plan.model.model_type}, {plan.model.parameters / 1e6:,.1f} M"
    return f"{model}, {plan.batch.train} x {plan.job.data.max_length} tokens, {device or plan.hardware.name}"


def profiles_with_claims(inputs: Inputs, names: Sequence[str] = ()) -> list[str]:
    """Of `names` (default: all installed profiles) those with claims."""
    return [name for name in names or inputs.files if inputs.profile(name).content.claims]
