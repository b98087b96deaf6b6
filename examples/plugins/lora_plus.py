"""LoRA+: the B matrices of a LoRA adapter learn with a higher rate than the A matrices.

Source: Hayou et al. 2024, LoRA+ (arXiv:2402.12354), which recommends a ratio of 16.
Hardware: any. Cost: none. Numerical effect: another learning rate, so another training method.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from pydantic import Field

from hwopt.plugin import Context, Decision, Evidence, Plugin, PluginOptions, Recipe, Relations, RunView, Stage


def lora_plus_groups(ratio: float, named: Sequence[tuple[str, Any]], training: Any) -> list[dict[str, Any]]:
    """Two parameter groups of `named` (name, parameter): the B matrices at `ratio` times the learning rate, and the rest."""
    groups: list[dict[str, Any]] = [{"params": [], "lr": training.learning_rate * ratio}, {"params": []}]
    for name, parameter in named:
        groups["lora_B" not in name]["params"].append((name, parameter))
    return groups


class LoraPlus(Plugin):
    name = "lora_plus"
    stage = Stage.OPTIMIZER
    effect = "method"
    relations = Relations(requires=("adapter",))

    class Options(PluginOptions):
        ratio: float = Field(default=16.0, gt=0, description="Learning rate of the B matrices over that of the A matrices.")

    def probe(self, context: Context) -> Decision:
        return Decision.apply(f"B matrices learn {self.options.ratio:g} times as fast as A matrices")

    def apply(self, recipe: Recipe, context: Context) -> None:
        recipe.parameter_groups = partial(lora_plus_groups, self.options.ratio)

    def evidence(self, run: RunView) -> Evidence:
        rates: dict[bool, float] = {}
        for group in run.optimizer.param_groups:
            rates["lora_B" in group["param_names"][0]] = group["initial_lr"]
        if len(rates) < 2 or not rates[False]:
            return Evidence.inactive(f"peak learning rates: {rates}")
        ratio = round(rates[True] / rates[False], 6)
        return Evidence.active(f"learning rate of B matrices {ratio:g} times that of the rest", ratio=ratio)

    def expects(self) -> Mapping[str, Any]:
        return {"ratio": round(self.options.ratio, 6)}
