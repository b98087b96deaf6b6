"""NEFTune: uniform noise on the embeddings in training, which makes instruction tuning overfit less.

The noise is alpha / sqrt(width x embedding size) at most, where the width is that of the longest row of the step. So it does not
depend on how a step is split into micro-batches.

Source: Jain et al. 2023 (arXiv:2310.05914); `neftune_noise_alpha` of transformers and TRL.
Hardware: any.
Cost: three kernels per micro-batch.
Numerical effect: another training method.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import Any, ClassVar

from pydantic import Field

from hwopt import plugin as hw


class EmbeddingNoise(hw.Events):
    """Adds the noise to the output of the input embeddings of one model."""

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha
        self.calls = 0
        """Of the hook in this step."""
        self.hooks: list[Any] = []
        self.scale: Any = None
        """The largest noise of this step, a number on the device: a captured graph reads it at each replay. 0 before step 1."""

    def add_to(self, model: Any, run: hw.RunView) -> Any:
        """A model step."""
        import torch

        embeddings = model.get_input_embeddings()
        self.scale = torch.zeros((), device=run.device)
        self.size = int(embeddings.weight.shape[-1])
        # encoder and decoder embed with layers of their own that share the weight of the input embeddings
        sharing = (module for module in model.modules() if getattr(module, "weight", None) is embeddings.weight)
        layers = [embeddings, *(module for module in sharing if isinstance(module, torch.nn.Embedding))]
        self.hooks = [layer.register_forward_hook(self.noisy) for layer in dict.fromkeys(layers)]
        return model

    def noisy(self, embeddings: Any, inputs: Any, output: Any) -> Any:
        if not embeddings.training:
            return output
        self.calls += 1
        return output + output.new_empty(output.shape).uniform_(-1, 1) * self.scale

    def on_step_begin(self, run: hw.RunView) -> None:
        self.calls = 0
        if run.step_batch is not None:
            self.scale.fill_(self.alpha / sqrt(max(run.step_batch.lengths) * self.size))

    def remove_from(self, model: Any, run: hw.RunView) -> Any:
        """A final step."""
        for hook in self.hooks:
            hook.remove()
        return model


class NefTune(hw.Plugin):
    name = "neftune"
    stage = hw.Stage.MODEL
    effect = "method"
    relations = hw.Relations(after=("adapter",))  # it may wrap the embeddings
    aliases: ClassVar[Mapping[str, str | hw.Alias]] = {"neftune_noise_alpha": "alpha"}

    class Options(hw.PluginOptions):
        alpha: float = Field(default=5.0, gt=0)
        """Size of the noise."""

    options: Options

    def probe(self, context: hw.Context) -> hw.Decision:
        if context.task.inputs == "images":
            return hw.Decision.skip("images have no embeddings of tokens")
        return hw.Decision.apply(f"noise of {self.options.alpha:g} / sqrt(width x embedding size) on the embeddings")

    def apply(self, recipe: hw.Recipe, context: hw.Context) -> None:
        noise = EmbeddingNoise(self.options.alpha)
        recipe.model_steps.append(noise.add_to)
        recipe.events.append(noise)
        recipe.final_steps.append(noise.remove_from)

    def evidence(self, run: hw.RunView) -> hw.Evidence:
        noise = next(part for part in run.parts if isinstance(part, EmbeddingNoise))
        scale, micro_batches = float(noise.scale), len(run.last_step_batch.sizes) or 1  # a script may not say them
        seen = f"noise of at most {scale:.3g} added {noise.calls} times in a step of {micro_batches} micro-batch(es)"
        return hw.Evidence.of(noise.calls >= micro_batches and scale > 0, seen)
