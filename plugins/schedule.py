"""Learning-rate warm-up as a share of all optimizer steps.

Adam's second moments are noise in the first steps; a small learning rate keeps them from throwing pretrained weights away.
Source: Vaswani et al. 2017, section 5.3 (arXiv:1706.03762); why: Liu et al. 2020 (arXiv:1908.03265).
Hardware: any. Cost: none. Numerical effect: another learning rate in the first steps, so another training method.
The shape after the warm-up is the job's `lr_scheduler_type`; a job that sets its own warm-up wins.
"""

from __future__ import annotations

from pydantic import Field

from hwopt.plugin import Context, Decision, Evidence, Plugin, PluginOptions, Recipe, RunView, Stage


def warmup_steps(ratio: float, total_steps: int) -> int:
    """Optimizer steps of a warm-up over `ratio` of `total_steps`, rounded up as transformers does."""
    return -int(-ratio * total_steps // 1)


class Schedule(Plugin):
    name = "schedule"
    stage = Stage.LOOP
    preserves = "rounding"  # what it sets is a hyperparameter: with the same numbers the result is the same

    class Options(PluginOptions):
        warmup_ratio: float = Field(default=0.06, ge=0, lt=1, description="Share of all optimizer steps, 0 to below 1.")

    options: Options

    def probe(self, context: Context) -> Decision:
        reason = f"the learning rate grows from 0 over the first {self.options.warmup_ratio:.1%} of the steps"
        for key in ("warmup_steps", "warmup_ratio"):
            own = getattr(context.job.training, key)
            if own is not None:
                return Decision.apply(f"the job's own training.{key} = {own} wins; without it, {reason}")
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
            return Evidence.unknown(f"the warm-up is over before it can be seen: {seen}")
        return Evidence.active(seen) if rate < base else Evidence.inactive(seen)
