"""Optimizer in backward: updates each parameter as soon as its gradient is complete, and frees the gradient.

At most a few gradients exist at a time, instead of those of all parameters. The update is the usual one, bit for bit, but no step
can add up several micro-batches, and nothing can look at the whole gradient before the update. So clipping by the norm of the
whole gradient is refused, unless `clipping` says what to do instead.

Source: https://docs.pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html; `optimizer_in_bwd` of torchtune;
LOMO, Lv et al. 2023 (arXiv:2306.09782).
Hardware: any, one rank.
Cost: one call of the optimizer per parameter. With an optimizer that takes no `found_inf` (8 bit, 4 bit, paged) the host waits
for the device once per parameter. A step that runs out of memory cannot be retried.
Numerical effect: none without clipping. If a gradient is not finite, this and all later updates of the step are skipped; the
parameters behind it in the model were already updated, unless the loss itself is not finite.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Literal

from hwopt import plugin as hw


class InStep(hw.Events):
    """Lets the backward pass update the weights: outside a step, as in a test of the batch size, it must not."""

    def on_step_begin(self, run: hw.RunView) -> None:
        engine: Any = run.engine
        engine.in_step = True


class OptimizerInBackward(hw.Plugin):
    name = "optimizer_in_backward"
    stage = hw.Stage.DISTRIBUTION
    relations = hw.Relations(
        conflicts=(
            hw.Conflict(
                field="accelerator['mixed_precision']",
                why='fp16 needs a loss scaler, which needs the whole gradient before the update; set dtype = "bf16"',
                when=lambda in_backward, precision: getattr(precision, "dtype", "fp16") == "fp16",
            ),
            hw.Conflict(
                field="cut",
                why="recipe.cut splits a step into several micro-batches, and here a step has one; keep one of the two tables",
            ),
        )
    )
    aliases: ClassVar[Mapping[str, str]] = {"optimizer_in_bwd": "enabled = true"}

    class Options(hw.PluginOptions):
        clipping: Literal["refuse", "off", "parameter"] = "refuse"
        """What to do if training.max_grad_norm is above 0. refuse: end with an error. off: do not clip. parameter: clip
        each gradient to this norm."""

    options: Options

    @property
    def traits(self) -> hw.Traits:
        lacks = ("whole_gradients", "retry", "single_update", "accumulation")
        return hw.Traits(lacks=(*lacks, "clipping") if self.options.clipping == "refuse" else lacks)

    @property
    def effect(self) -> hw.Effect:
        return "bits" if self.options.clipping == "refuse" else "method"

    def probe(self, context: hw.Context) -> hw.Decision:
        ranks = context.world_size
        if ranks > 1:
            return hw.Decision.skip(f"needs one rank, found {ranks}: gradients are summed over the ranks after the backward pass")
        clipping = "each gradient is clipped by its own norm" if self.options.clipping == "parameter" else "no clipping"
        return hw.Decision.apply(f"updates each parameter in the backward pass, then frees its gradient; {clipping}")

    def apply(self, recipe: hw.Recipe, context: hw.Context) -> None:
        engine = hw.Lazy("hwopt_plugins.optimizer_in_backward.engine:InBackwardEngine")
        recipe.engine = partial(engine, clip=self.options.clipping == "parameter")
        recipe.events.append(InStep())

    def memory(self, spec: hw.MemorySpec, context: hw.Context) -> None:
        spec.gradient_bytes = 0.0

    def evidence(self, run: hw.RunView) -> hw.Evidence:
        updated, parameters = getattr(run.engine, "updated", 0), len(run.engine.parameters)
        missed = getattr(run.engine, "missed", run.parameter_names)
        seen = f"{updated} of {parameters} parameters were updated in the backward pass of this step; {len(missed)} after it"
        seen += f": {hw.first_names(missed)}" if missed else ""
        return hw.Evidence.of(updated and not missed, seen)
