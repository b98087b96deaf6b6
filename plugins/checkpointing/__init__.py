"""Activation checkpointing: a layer stores only its input and recomputes its activations in the backward pass.

`layers = "all"` checkpoints every layer, `layers = n` every n-th one, `layers = "auto"` as little as the forecast allows: none,
"selective" or "all". "selective" stores the results of matrix products and attention, and recomputes only cheap operations.
`offload = true` also moves the stored inputs to pinned host memory until the backward pass. Then the device holds the input of
one layer at a time, whatever the number of layers.

Source: Chen et al. 2016 (arXiv:1604.06174); https://docs.pytorch.org/docs/stable/checkpoint.html.
Hardware: any; offload needs CUDA.
Cost: one more forward pass of the checkpointed layers, about a third of the step time for "all"; a few percent for "selective".
Offload sends each input over the bus twice, and does not overlap this with the computation.
Numerical effect: none, bit-identical. The random state is restored for the recomputation, so dropout masks are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from hwopt import plugin as hw
from hwopt.errors import PluginError

Layers = Literal["all", "selective", "auto"] | Annotated[int, Field(ge=1)]


def pinned_copy(tensor: Any) -> Any:
    """A copy of a CUDA tensor in pinned host memory, without a wait: `save_on_cpu` of torch 2.11 waits for each copy."""
    import torch

    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


class HostInputs:
    """Calls `checkpoint` on a layer, and keeps the layer's first input in pinned host memory until the backward pass.

    Other inputs stay on the device: a mask is shared by all layers, and an expanded one would be stored in full for each layer.
    """

    def __init__(self, checkpoint: Any) -> None:
        self.checkpoint = checkpoint
        self.count = 0
        """Number of inputs that were moved to the host since the run began."""
        self.bytes = 0

    def __call__(self, function: Any, *inputs: Any) -> Any:
        from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

        on_host = save_on_cpu(pin_memory=True)
        shape = inputs[0].shape if inputs else None

        def pack(tensor: Any) -> Any:
            if tensor.shape != shape:
                return tensor.device, tensor
            device, stored = (tensor.device, pinned_copy(tensor)) if tensor.is_cuda else on_host.pack_hook(tensor)
            if stored.device != device:
                self.count, self.bytes = self.count + 1, self.bytes + stored.nbytes
            return device, stored

        with saved_tensors_hooks(pack, on_host.unpack_hook):
            return self.checkpoint(function, *inputs)


def repeated_layers(model: Any) -> dict[str, Any]:
    """Name -> layer, for the layers of a transformers model that support checkpointing, in order; PEFT may wrap `model`."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, GradientCheckpointingLayer)}


def checkpoint_layers(model: Any, layers: Layers = "all", offload: bool = False) -> int:
    """The number of layers of `model` in which this function turned on checkpointing.

    Sets the attributes of the layers directly. The function of transformers has another name in each version, and it also hooks
    `requires_grad_` on the embeddings, which only reentrant checkpointing needs.
    """
    from torch.utils.checkpoint import checkpoint

    from hwopt_plugins.checkpointing.selective import keep_products

    settings: dict[str, Any] = {"context_fn": keep_products} if layers == "selective" else {}
    # the reentrant variant gives frozen inputs, as after `get_peft_model`, no gradient (transformers#21381)
    run: Any = partial(checkpoint, use_reentrant=False, preserve_rng_state=True, **settings)
    if offload:
        run = HostInputs(run)
    chosen = list(repeated_layers(model).values())[:: interval(layers)]
    for layer in chosen:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = run
    model.config.use_cache = False  # the recomputation would fill a cache a second time
    return len(chosen)


def interval(layers: Layers) -> int:
    """The n for which every n-th layer is checkpointed."""
    return layers if isinstance(layers, int) else 1


def described(layers: Layers, count: int, offload: bool = False) -> tuple[float, str, str]:
    """(step time relative to no checkpointing, what it does, what it means for a model of `count` layers)."""
    if layers == "all":
        where = "inputs in pinned host memory, " if offload else ""
        note, meaning = "recomputes the forward pass of every layer", f"{where}least memory, about a third more time"
        return 1.33, note, f"all {count} layers: {meaning}"
    if layers == "selective":
        meaning = "storing products and attention: a few percent more time"
        return 1.05, "recomputes all but matrix products and attention", f"all {count} layers, {meaning}"
    part = f"one in {layers}"
    return 1 + 0.33 / interval(layers), f"recomputes the forward pass of {part} layers", f"{part} of {count} layers"


class Checkpointing(hw.Plugin):
    name = "checkpointing"
    stage = hw.Stage.MODEL
    effect = "bits"
    relations = hw.Relations(
        after=("adapter",),  # PEFT may replace modules
        conflicts=(
            hw.Conflict(
                plugin="compile",
                why="a compiled layer cannot move its input to the host; set offload = false, or remove [plugins.compile]",
                when=lambda checkpointing, compiled: checkpointing.offload,
            ),
        ),
    )
    aliases: ClassVar[Mapping[str, str]] = {
        "gradient_checkpointing": "layers = 'all'",
        "activation_checkpointing": "layers = 'all'",
        "activation_offloading": "offload = true",
        "enable_activation_offloading": "offload = true",
    }

    class Options(hw.PluginOptions):
        layers: Annotated[Layers, hw.FitsMemory()] = "all"
        """Which layers: "all", "selective" (store matrix products and attention), n: every n-th, or "auto": by the forecast."""
        offload: bool = False
        """Keep the inputs of the checkpointed layers in pinned host memory."""

        @model_validator(mode="after")
        def require_stored_inputs(self) -> Checkpointing.Options:
            if self.offload and self.layers == "selective":
                raise ValueError(
                    'offload = true moves layer inputs, but layers = "selective" also stores products on the device: '
                    'set layers = "all"'
                )
            return self

    options: Options

    def probe(self, context: hw.Context) -> hw.Decision:
        model, layers = context.model, self.options.layers
        if not model.supports_checkpointing:
            return hw.Decision.skip(f"{model.architecture} does not support activation checkpointing")
        if isinstance(layers, int) and layers > model.layers:
            to = self.options.changed(layers=model.layers)
            return hw.Decision.fallback(
                to, f"one in {layers} layers needs {layers} layers, {model.architecture} has {model.layers}"
            )
        able = context.hardware.can("offload")
        if layers == "auto":
            offload = self.options.offload and bool(able)
            names = ["all"] if offload else ["selective", "all"]
            options = [self.options.changed(layers=name, offload=offload) for name in names]
            return hw.Decision.choose(options, f"the fastest that fits of: off, {', '.join(names)}", optional=True)
        if self.options.offload and not able:
            to = self.options.changed(offload=False)
            return hw.Decision.fallback(to, f"{able.reason}; the inputs of the layers stay there")
        return hw.Decision.apply(described(layers, model.layers, self.options.offload)[2])

    def apply(self, recipe: hw.Recipe, context: hw.Context) -> None:
        def enable(model: Any, run: hw.RunView) -> Any:
            if checkpoint_layers(model, self.options.layers, self.options.offload) == 0:
                raise PluginError(
                    f"plugin 'checkpointing': {type(model).__name__} claims to support checkpointing but has no "
                    "GradientCheckpointingLayer. Remove [plugins.checkpointing]"
                )
            return model

        recipe.model_steps.append(enable)

    @classmethod
    def alternatives(cls, options: Any | None, context: hw.Context) -> list[hw.Scale]:
        """Fewer and fewer layers, and off; on a GPU also whether the inputs of the layers stay there.

        Turning it on costs time, but may make room for larger micro-batches. Only a forecast with the card's peaks tells.
        """
        if not context.model.supports_checkpointing:
            return []
        keep = {"offload": False} if options is not None and options.offload else {}
        every = {each for each in (2, options and options.layers) if isinstance(each, int) and each <= context.model.layers}
        layers: list[Layers] = ["all", *sorted(every), "selective"]
        about = {each: described(each, context.model.layers) for each in layers}
        choices = [hw.Choice(changes={"layers": each, **keep}, note=note, time=time) for each, (time, note, _) in about.items()]
        choices.append(replace(hw.OFF, note="stores all activations, computes no layer twice"))
        present = len(layers) if options is None else layers.index(options.layers)
        scales = [hw.Scale(choices=tuple(choices), present=present, tune=options is not None or context.card is not None)]
        if context.hardware.can("offload"):
            on_host = "recomputes every layer, and moves the layer inputs to host memory"
            moved = hw.Choice(changes={"layers": "all", "offload": True}, note=on_host, time=1.4)
            time = moved.time if keep else choices[present].time
            stay = hw.Choice(changes={"offload": False}, note="keeps the layer inputs on the device", time=time)
            scales.append(hw.Scale(choices=(moved, stay), present=0 if keep else 1))
        return scales

    def on_oom(self, run: hw.RunView) -> str | None:
        if any(module._compiled_call_impl is not None for module in run.inner_model.modules()):
            return None  # a compiled graph cannot be changed
        count = checkpoint_layers(run.inner_model)
        return f"activations of {count} layers are recomputed instead of stored (about a third slower)" if count else None

    def evidence(self, run: hw.RunView) -> hw.Evidence:
        layers = repeated_layers(run.inner_model)
        on = {name: layer for name, layer in layers.items() if layer.gradient_checkpointing}
        every = interval_of(list(layers), list(on))
        seen = f"on in {len(on)} of {len(layers)} layers"
        if not every:
            seen += f"; off in {hw.first_names([name for name in layers if name not in on])}"
        if not on:
            return hw.Evidence.inactive(seen, offload=False, every=every)
        host = next((found for layer in on.values() if isinstance(found := layer._gradient_checkpointing_func, HostInputs)), None)
        offload = host is not None and host.count > 0
        if host is not None:
            moved = f"{host.count} inputs, {host.bytes / 2**20:,.1f} MiB," if offload else "no input of a layer was"
            seen += f"; {moved} moved to host memory"
        found = {"offload": offload, "every": every}
        if run.observation.forward_calls:
            again = recomputed(run, on)
            stored = [name for name, twice in again.items() if not twice]
            seen += f"; {len(again) - len(stored)} of {len(again)} with a backward pass were recomputed"
            seen += f", not {hw.first_names(stored)}" if stored else ""
            return hw.Evidence.of(again and not stored, seen, **found)
        # one call per layer and micro-batch in the forward pass, and one more per recomputed layer; each has one backward call
        calls, backward_calls = attention_calls(run.observation.operators)
        forward_calls = max(len(layers) * len(run.last_step_batch.sizes), backward_calls)
        seen += f"; {calls} attention calls in this step, {forward_calls} without recomputation"
        if calls < forward_calls:  # compiled code has its own kernels for attention
            return hw.Evidence.unknown(f"{seen}; recomputation cannot be counted without them", **found)
        return hw.Evidence.of(calls > forward_calls, seen, **found)

    def expects(self) -> Mapping[str, Any]:
        return {"offload": self.options.offload, "every": interval(self.options.layers)}


def interval_of(layers: list[str], on: list[str]) -> int:
    """The n for which `on` is every n-th one of `layers`, as `checkpoint_layers` chooses them; 0 if there is none."""
    return next((every for every in range(1, len(layers) + 1) if on == layers[::every]), 0)


def recomputed(run: hw.RunView, on: Mapping[str, Any]) -> dict[str, bool]:
    """Name -> whether the modules of this checkpointed layer ran twice for each micro-batch of the observed step.

    Frozen layers below the first trained weight have no backward pass, and LayerDrop skips layers at random: both are left out.
    """
    calls, micro_batches = run.observation.forward_calls, len(run.last_step_batch.sizes)
    embeddings = run.inner_model.get_input_embeddings()
    trained = any(parameter.requires_grad for parameter in embeddings.parameters())
    found = {}
    for name, layer in on.items():
        trained = trained or any(parameter.requires_grad for parameter in layer.parameters())
        most = max((calls.get(f"{name}.{inner}", 0) for inner, _ in layer.named_modules() if inner), default=0)
        if trained and calls.get(name, 0) >= micro_batches:
            found[name] = most >= 2 * micro_batches
    return found


def attention_calls(operators: Mapping[str, int]) -> tuple[int, int]:
    """(forward calls, backward calls) of attention: of the SDPA kernels, else of the softmax of eager attention."""
    kernels = {name: count for name, count in operators.items() if name.startswith("aten::_scaled_dot_product_")}
    backward = sum(count for name, count in kernels.items() if name.endswith("_backward"))
    forward = sum(kernels.values()) - backward or operators.get("aten::_softmax", 0)
    return forward, backward or operators.get("aten::_softmax_backward_data", 0)
