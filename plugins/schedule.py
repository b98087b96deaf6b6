"""Learning-rate warm-up over a fraction of all optimizer steps.

Adam's second moments are noisy in the first steps; a small learning rate prevents large updates of the pretrained weights.
After the warm-up the learning rate follows the job's `lr_scheduler_type`. A warm-up in the job overrides this plugin.

Source: Vaswani et al. 2017, section 5.3 (arXiv:1706.03762); reason: Liu et al. 2020 (arXiv:1908.03265).
Hardware: any.
Cost: none.
Numerical effect: a different learning rate in the first steps, which is part of the training method.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isclose
from typing import Any

from pydantic import Field

from hwopt import plugin as hw


def warmup_steps(ratio: float, total_steps: int) -> int:
    """The number of warm-up steps, `ratio` of `total_steps`, rounded up as in transformers."""
    return -int(-ratio * total_steps // 1)


class Schedule(hw.Plugin):
    name = "schedule"
    stage = hw.Stage.LOOP
    effect = "rounding"  # the warm-up is a hyperparameter: with equal values the results agree up to rounding

    class Options(hw.PluginOptions):
        warmup_ratio: float = Field(default=0.06, ge=0, lt=1)
        """Fraction of all optimizer steps, at least 0 and below 1."""

    options: Options

    def probe(self, context: hw.Context) -> hw.Decision:
        reason = f"the learning rate grows from 0 over the first {self.options.warmup_ratio:.1%} of the steps"
        for key in ("warmup_steps", "warmup_ratio"):
            value = getattr(context.job.training, key)
            if value is not None:
                options = self.options if value else self.options.changed(warmup_ratio=0.0)
                return hw.Decision.apply(f"overridden by training.{key} = {value} of the job; without it: {reason}", options)
        return hw.Decision.apply(reason)

    def apply(self, recipe: hw.Recipe, context: hw.Context) -> None:
        recipe.training["warmup_ratio"] = self.options.warmup_ratio

    def evidence(self, run: hw.RunView) -> hw.Evidence:
        scheduler = run.scheduler
        factor, done = scheduler.lr_lambdas[0], scheduler.last_epoch
        rates = [float(group["lr"]) for group in scheduler.optimizer.param_groups]
        rate, base = rates[0], float(scheduler.base_lrs[0])
        grows = next((step for step in range(run.total_steps) if factor(step + 1) <= factor(step)), run.total_steps)
        seen = f"learning rate {rate:.3g} of {base:.3g} after {done} steps; warm-up over {grows} of {run.total_steps} steps"
        pairs = zip(rates, (float(base) * factor(done) for base in scheduler.base_lrs), strict=True)
        wrong = [(found, right) for found, right in pairs if not isclose(found, right, rel_tol=1e-6, abs_tol=1e-12)]
        if wrong:
            found, right = wrong[0]
            groups = f"{len(wrong)} of {len(rates)} group(s) of weights have {found:.3g}"
            return hw.Evidence.inactive(f"{seen}; {groups}, the schedule asks for {right:.3g}")
        if len({factor(step) for step in range(run.total_steps)}) == 1:
            return hw.Evidence.unknown(f"{seen}; this schedule has one rate")
        return hw.Evidence.active(seen, warmup=grows > 0 and factor(0) < factor(grows))

    def expects(self) -> Mapping[str, Any]:
        return {"warmup": self.options.warmup_ratio > 0}
