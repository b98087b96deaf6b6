"""Learning-rate warm-up over a fraction of all optimizer steps.

Adam's second moments are noisy in the first steps; a small learning rate prevents large updates of the pretrained weights.
After the warm-up the learning rate follows the job's `lr_scheduler_type`. A warm-up in the job overrides this plugin.

Source: Vaswani et al. 2017, section 5.3 (arXiv:1706.03762); reason: Liu et al. 2020 (arXiv:1908.03265).
Hardware: any.
Cost: none.
Numerical effect: a different learning rate in the first steps, which is part of the training method.
"""

from __future__ import annotations

from pydantic import Field

from hwopt.plugin import Context, Decision, Evidence, Plugin, PluginOptions, Recipe, RunView, Stage


def warmup_steps(ratio: float, total_steps: int) -> int:
    """The number of warm-up steps, `ratio` of `total_steps`, rounded up as in transformers."""
    return -int(-ratio * total_steps // 1)


class Schedule(Plugin):
    name = "schedule"
    stage = Stage.LOOP
    preserves = "rounding"  # the warm-up is a hyperparameter: with equal values the results agree up to rounding

    class Options(PluginOptions):
        warmup_ratio: float = Field(
            default=0.06, ge=0, lt=1, description="Fraction of all optimizer steps, at least 0 and below 1."
        )

    options: Options

    def probe(self, context: Context) -> Decision:
        reason = f"the learning rate grows from 0 over the first {self.options.warmup_ratio:.1%} of the steps"
        for key in ("warmup_steps", "warmup_ratio"):
            value = getattr(context.job.training, key)
            if value is not None:
                return Decision.apply(f"overridden by training.{key} = {value} of the job; without it: {reason}")
        return Decision.apply(reason)

    def apply(self, recipe: Recipe, context: Context) -> None:
        recipe.training["warmup_ratio"] = self.options.warmup_ratio

    def evidence(self, run: RunView) -> Evidence:
        ratio, steps = run.training.warmup_ratio, run.training.warmup_steps
        if steps is None:
            steps = warmup_steps(ratio or 0.0, run.total_steps)
        group = run.optimizer.param_groups[0]
        rate, base = float(group["lr"]), float(group.get("initial_lr", run.training.learning_rate))
        seen = f"learning rate {rate:.3g} of {base:.3g} after step {run.step}; warm-up over {steps} of {run.total_steps} steps"
        if steps <= run.step:
            return Evidence.unknown(f"the warm-up ended before it could be observed: {seen}")
        return Evidence.active(seen) if rate < base else Evidence.inactive(seen)
