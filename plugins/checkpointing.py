"""Activation checkpointing: layers keep their input and compute the rest again in the backward pass.

Source: Chen et al. 2016 (arXiv:1604.06174); https://docs.pytorch.org/docs/stable/checkpoint.html, non-reentrant.
layers = "all", every n-th layer (n), or "selective": the results of matrix products and attention are kept, and only what is
cheap (norms, activations, dropout) is computed again.
Hardware: any. Cost: about one more forward pass of the layers in question (a third of the step for "all"), less for the rest.
Numerical effect: none, the same bits; the random state is put back for the second pass, so dropout draws the same masks.
The re-entrant form gives frozen inputs no gradient and only warns (transformers#21381): non-reentrant needs no
`enable_input_require_grads`, and so works after `get_peft_model` too.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from hwopt.errors import PluginError
from hwopt.plugin import Context, Decision, Evidence, MemoryOption, Plugin, PluginOptions, Recipe, RunView, Stage


def keep_products() -> Any:
    """The two contexts of `checkpoint(context_fn=…)`: the first pass keeps products and attention, the second takes them."""
    import torch
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    aten = torch.ops.aten
    kept = [
        aten.mm.default,
        aten.addmm.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    ]
    return create_selective_checkpoint_contexts(kept)


def repeated_layers(model: Any) -> list[Any]:
    """The layers of a transformers model that can be checkpointed, in order, also inside a PEFT wrapper."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def checkpoint_layers(model: Any, every: int = 1, selective: bool = False) -> int:
    """Switch on non-reentrant checkpointing in every `every`-th layer of `model`; how many layers that is.

    The switches are set on the layers themselves: transformers' own function is deprecated under one name, missing in
    older versions under the other, and hooks `requires_grad_` on the embeddings, which only the re-entrant form needs.
    """
    from torch.utils.checkpoint import checkpoint

    settings: dict[str, Any] = {"context_fn": keep_products} if selective else {}
    run = partial(checkpoint, use_reentrant=False, preserve_rng_state=True, **settings)
    chosen = repeated_layers(model)[::every]
    for layer in chosen:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = run
    model.config.use_cache = False  # a cache would be filled twice
    return len(chosen)


class Checkpointing(Plugin):
    name = "checkpointing"
    stage = Stage.MODEL
    after = ("adapter",)  # the wrapper may replace modules
    preserves = "bits"
    helps_oom = True  # it needs no option, changes no bit, and is what is left once micro-batches are single rows
    aliases: ClassVar[Mapping[str, str]] = {
        "gradient_checkpointing": "layers = 'all'",
    }

    class Options(PluginOptions):
        layers: Literal["all", "selective"] | Annotated[int, Field(ge=1)] = Field(
            default="all", description='"all", "selective" (keep products and attention), or n: every n-th layer.'
        )

    options: Options

    def probe(self, context: Context) -> Decision:
        model, layers = context.model, self.options.layers
        if not model.supports_checkpointing:
            return Decision.skip(f"{model.architecture} does not support activation checkpointing")
        if isinstance(layers, int) and layers > model.layers:
            to = self.Options(layers=model.layers)
            return Decision.fallback(to, f"one in {layers} layers needs {layers}, {model.architecture} has {model.layers}")
        if layers == "all":
            return Decision.apply(f"all {model.layers} layers: least memory, about a third more time")
        if layers == "selective":
            return Decision.apply(f"all {model.layers} layers, which keep products and attention: a few per cent more time")
        return Decision.apply(f"one in {layers} of {model.layers} layers")

    def apply(self, recipe: Recipe, context: Context) -> None:
        layers = self.options.layers
        every, selective = (layers, False) if isinstance(layers, int) else (1, layers == "selective")

        def enable(model: Any, run: RunView) -> Any:
            if checkpoint_layers(model, every, selective) == 0:
                raise PluginError(
                    f"plugin 'checkpointing': {type(model).__name__} says that it supports checkpointing but has no "
                    "GradientCheckpointingLayer; remove [plugins.checkpointing]"
                )
            return model

        recipe.model_steps.append(enable)

    @classmethod
    def memory_options(cls, options: Any | None, context: Context) -> list[MemoryOption]:
        if options is not None and options.layers == "all":
            return []
        selective = MemoryOption(cls.Options(layers="selective"), 1.05, "computes all but products and attention twice")
        everything = MemoryOption(cls.Options(), 1.33, "computes every layer's forward twice")
        return [selective, everything] if options is None else [everything]

    def on_oom(self, run: RunView) -> str | None:
        if any(module._compiled_call_impl is not None for module in run.inner_model.modules()):
            return None  # its graph is made already
        count = checkpoint_layers(run.inner_model)
        return f"activations of {count} layers are computed twice instead of kept (about a third slower)" if count else None

    def evidence(self, run: RunView) -> Evidence:
        layers = repeated_layers(run.inner_model)
        on = sum(layer.gradient_checkpointing for layer in layers)
        seen = f"on in {on} of {len(layers)} layers"
        # called once a layer in the forward pass, and once more where the layer is computed again
        calls = sum(
            count
            for name, count in run.observation.operators.items()
            if name.startswith("aten::_scaled_dot_product_") and not name.endswith("_backward")
        )
        once = len(layers) * len(run.last_step_batch.sizes)
        if on == 0:
            return Evidence.inactive(seen)
        if calls == 0 or any(module._compiled_call_impl is not None for module in run.inner_model.modules()):
            return Evidence.active(f"{seen}; the second pass cannot be counted in compiled code or with eager attention")
        seen += f"; attention called {calls} times in step 1, {once} without a second pass"
        return Evidence.active(seen) if calls > once else Evidence.inactive(seen)
