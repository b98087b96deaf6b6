"""Gradient noise: Gaussian noise on the gradients, which decays over the run.

Source: Neelakantan et al. 2015 (arXiv:1511.06807): variance eta / (1 + step) ** gamma, gamma = 0.55.
Hardware: any. Cost: one random tensor per parameter and step. Numerical effect: another training method.
The noise is a function of (seed, step, parameter), so it is the same on every rank and after a resume.
"""

from typing import Any

from pydantic import Field

from hwopt.plugin import Context, Decision, Events, Evidence, Plugin, PluginOptions, Recipe, RunView, Stage


def add_noise(gradient: Any, deviation: float, seed: int) -> None:
    """Add Gaussian noise of standard deviation `deviation` to `gradient`, in place."""
    import torch

    generator = torch.Generator(gradient.device).manual_seed(seed)
    gradient.add_(torch.randn(gradient.shape, generator=generator, device=gradient.device), alpha=deviation)


class Noise(Events):
    """Adds the noise of one run."""

    def __init__(self, eta: float, gamma: float) -> None:
        self.eta, self.gamma = eta, gamma
        self.gradients = 0

    def on_gradients(self, run: RunView) -> None:
        deviation = (self.eta / (1 + run.step) ** self.gamma) ** 0.5
        for number, (_, gradient) in enumerate(run.engine.gradients()):
            add_noise(gradient, deviation, seed=hash((run.training.seed, run.step, number)) % 2**63)
            self.gradients += 1


class GradientNoise(Plugin):
    name = "gradient_noise"
    stage = Stage.LOOP
    effect = "method"

    class Options(PluginOptions):
        eta: float = Field(default=0.01, gt=0, description="Variance of the noise in the first step.")
        gamma: float = Field(default=0.55, ge=0, description="How fast the variance decays.")

    def probe(self, context: Context) -> Decision:
        return Decision.apply(f"variance {self.options.eta:g} / (1 + step) ** {self.options.gamma:g}")

    def apply(self, recipe: Recipe, context: Context) -> None:
        recipe.events.append(Noise(self.options.eta, self.options.gamma))

    def evidence(self, run: RunView) -> Evidence:
        noise = next(part for part in run.parts if isinstance(part, Noise))
        seen = f"noise added to {noise.gradients} gradients so far"
        return Evidence.of(noise.gradients >= len(run.engine.parameters), seen)
