"""Finds what memory that a plan leaves free can buy: the options that plugins offer for speed, on the forecast's memory and time.

Only options that fit with the reserve and that the roofline predicts to be faster are returned. The forecast compares the same
card and model twice, so that most of its error cancels out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from hwopt.errors import HwoptError
from hwopt.memory.advice.changes import Advisor, PlanListener
from hwopt.memory.forecast.planner import highest_gib, plan_memory
from hwopt.planning.alternatives import current_options, scales_of
from hwopt.planning.memory_plan import Gain, MemoryPlan, Prediction
from hwopt.planning.plan import Plan, Replan
from hwopt.plugin import Choice
from hwopt.plugin.registry import Registry

MIN_GAIN = 0.02
"""Fraction of the step time below which a gain is not worth a line."""


def with_gains(
    plan: Plan, memory: MemoryPlan, registry: Registry, replan: Replan, cache: Path, listener: PlanListener | None = None
) -> MemoryPlan:
    """Return `memory` with what its free rest can buy; `listener` hears of each gain as it is found.

    Returns `memory` as it is if the plan does not fit for sure, or if its time is not predicted.
    """
    if memory.fits is not True or memory.time is None:
        return memory
    search = LeftoverSearch(Advisor(plan, memory, registry, replan, cache, listener or PlanListener()))
    return replace(memory, gains=tuple(search.gains()))


class LeftoverSearch:
    """Evaluates options of one plan that need more memory."""

    def __init__(self, advisor: Advisor) -> None:
        self.advisor = advisor

    def gains(self) -> Iterator[Gain]:
        """Yield the first option of each plugin that fits and is faster, first those that keep the training."""
        found = []
        offers = {name: self.offers_of(name) for name in self.advisor.registry.names}
        for alters in (False, True):
            for name, offered in offers.items():
                gain = self.best_of(name, [offer for offer in offered if offer.alters == alters])
                if gain is not None:
                    self.advisor.listener.on_gain(gain)
                    found.append(gain)
                    yield gain
        kept = [gain for gain in found if not gain.alters]
        if len(kept) > 1 and (combined := self.combined(kept)) is not None:
            self.advisor.listener.on_gain(combined)
            yield combined

    def offers_of(self, name: str) -> list[Choice]:
        """Return the choices of an applied plugin that may be faster with more memory."""
        advisor = self.advisor
        if current_options(name, advisor.plan) is None:
            return []
        scales = scales_of(name, advisor.plan, advisor.registry)
        return [choice for scale in scales for choice in scale.with_more_memory]

    def best_of(self, name: str, offers: Sequence[Choice]) -> Gain | None:
        for offer in offers:
            if (gain := self.evaluate(name, offer)) is not None:
                return gain
        return None

    def evaluate(self, name: str, choice: Choice) -> Gain | None:
        """Return `choice` as a gain; None if it is not possible, does not fit or is not predicted to be faster."""
        lines, assignments = self.advisor.lines_and_assignments(name, choice)
        return self.gain(lines, assignments, choice.note, choice.alters)

    def combined(self, gains: Sequence[Gain]) -> Gain | None:
        """Return all `gains` as one; None if they do not fit together."""
        assignments = tuple(assignment for gain in gains for assignment in gain.assignments)
        return self.gain((f"the {len(gains)} above that keep the training, combined",), assignments, "all of their gains", False)

    def gain(self, lines: tuple[str, ...], assignments: tuple[str, ...], what: str, alters: bool) -> Gain | None:
        advisor = self.advisor
        advisor.listener.on_trial(", ".join(assignments))
        try:
            changed = plan_memory(advisor.replan(assignments), advisor.cache, advisor.lengths)
        except HwoptError:
            return None
        now = advisor.memory.time
        assert now is not None, "checked before the search"
        if changed.fits is not True or changed.time is None or changed.tier != advisor.memory.tier:
            return None
        relative = relative_time(now, changed.time)
        if max(relative) > 1 - MIN_GAIN:
            return None
        sizes = highest_gib(advisor.memory), highest_gib(changed)
        return Gain(lines, *sizes, changed.time.step, relative, what, alters, assignments)


def relative_time(now: Prediction, changed: Prediction) -> tuple[float, float]:
    """Return the time of a row with the change relative to now: the smaller and the larger of the forecast's two ends."""
    ends = [after / changed.rows / (before / now.rows) for before, after in zip(now.step, changed.step, strict=True)]
    return min(ends), max(ends)
