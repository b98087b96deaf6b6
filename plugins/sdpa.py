"""Attention with torch's scaled_dot_product_attention (SDPA), and an order of preference for its kernels.

The fused kernels do not write the (length x length) score matrix to memory: less memory and bandwidth at long lengths.
`prefer` needs at least two kernels: a padding mask rules out flash on CUDA, attention dropout rules out flash on a CPU, and torch
raises an error if no kernel is left.
`prefer = ["eager"]` uses the attention of transformers (matmul, softmax, matmul) as a baseline. It stores the score matrix for
the backward pass. Without this plugin transformers uses SDPA by default.

Source: flash, Dao 2023, FlashAttention-2 (arXiv:2307.08691); efficient, Rabe and Staats 2021 (arXiv:2112.05682);
https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html.
Hardware: flash and cudnn need compute capability 8.0, efficient 5.0; a CPU has flash and math.
Cost: none.
Numerical effect: rounding. Every kernel computes softmax in fp32.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

from pydantic import field_validator

from hwopt import plugin as hw
from hwopt.hardware.device import Feature, Hardware

Kernel = Literal["flash", "efficient", "cudnn", "math", "eager"]
EAGER: tuple[Kernel, ...] = ("eager",)
WITH_FLASH: tuple[Kernel, ...] = ("flash", "efficient", "math")
FEATURES: dict[str, Feature] = {"flash": "flash_attention", "efficient": "efficient_attention", "cudnn": "cudnn_attention"}
OPERATORS = {kernel: f"aten::_scaled_dot_product_{feature}" for kernel, feature in FEATURES.items()}
OPERATORS["math"] = "aten::_scaled_dot_product_attention_math"


def attention_kernels(kernels: Sequence[str]) -> Any:
    """Inside the block, torch uses the first of `kernels` that supports a call. Restores the previous order afterwards."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backends = [getattr(SDPBackend, FEATURES.get(kernel, kernel).upper()) for kernel in kernels]
    return sdpa_kernel(backends, set_priority=True)


def runnable(kernels: Sequence[Kernel], hardware: Hardware) -> tuple[tuple[Kernel, ...], list[str]]:
    """(kernels that the hardware supports, in order; a reason for each of the others). At least two kernels if possible."""
    capabilities = {kernel: hardware.can(FEATURES[kernel]) for kernel in kernels if kernel in FEATURES}
    unsupported = {kernel: capability.reason for kernel, capability in capabilities.items() if not capability}
    kept = tuple(kernel for kernel in kernels if kernel not in unsupported)
    if kept == ("math",):
        usual: Kernel = "efficient" if hardware.device_type == "cuda" else "flash"
        kept = (usual, "math") if hardware.can(FEATURES[usual]) else kept
    return kept, [f"{kernel}: {reason}" for kernel, reason in unsupported.items()]


def kernels_from(value: Any) -> Mapping[str, Any] | None:
    """The options for an `attn_implementation` of transformers."""
    kernels = {"eager": EAGER, "flash_attention_2": WITH_FLASH, "flash_attention_3": WITH_FLASH}
    if value == "sdpa":
        return {"enabled": True}
    return {"prefer": list(kernels[value])} if value in kernels else None


class Sdpa(hw.Plugin):
    name = "sdpa"
    stage = hw.Stage.MODEL
    effect = "rounding"
    aliases: ClassVar[Mapping[str, str | hw.Alias]] = {"attn_implementation": hw.Alias("prefer", kernels_from)}

    class Options(hw.PluginOptions):
        prefer: tuple[Kernel, ...] = ("flash", "efficient", "cudnn", "math")
        """At least two kernels in order of preference, one of them "math"; or ["eager"]: attention without SDPA."""

        @field_validator("prefer")
        @classmethod
        def require_two_kernels(cls, value: tuple[Kernel, ...]) -> tuple[Kernel, ...]:
            if value == EAGER:
                return value
            if "eager" in value:
                raise ValueError(f'prefer = {list(value)}: eager cannot be combined with kernels. Use ["eager"], or remove eager')
            if len(value) < 2 or "math" not in value or len(set(value)) < len(value):
                first = next((kernel for kernel in value if kernel != "math"), "flash")
                raise ValueError(
                    f"prefer = {list(value)} must be at least two different kernels, one of them 'math'. "
                    f"A mask, dropout or head size can rule out the others. Try {[first, 'math']}"
                )
            return value

    options: Options

    def probe(self, context: hw.Context) -> hw.Decision:
        if self.options.prefer == EAGER:
            return hw.Decision.apply("eager: attention without fused kernels, stores the score matrix")
        if not context.model.supports_sdpa:
            return hw.Decision.skip(f"{context.model.architecture} does not support scaled_dot_product_attention")
        kept, reasons = runnable(self.options.prefer, context.hardware)
        if context.hardware.device_type == "cpu" and context.model.attention_dropout > 0 and kept[0] == "flash":
            kept = ("math", "flash")
            reasons.append(f"flash: on a CPU it needs attention dropout 0 in training, found {context.model.attention_dropout:g}")
        text = f"{', '.join(kept)} in this order"
        if reasons:
            return hw.Decision.fallback(self.options.changed(prefer=kept), f"{'; '.join(reasons)}; takes {text}")
        return hw.Decision.apply(text)

    def apply(self, recipe: hw.Recipe, context: hw.Context) -> None:
        if self.options.prefer == EAGER:
            recipe.model_kwargs["attn_implementation"] = "eager"
            return
        recipe.model_kwargs["attn_implementation"] = "sdpa"
        recipe.process.append(partial(attention_kernels, self.options.prefer))

    @classmethod
    def alternatives(cls, options: Any | None, context: hw.Context) -> list[hw.Scale]:
        """Each kernel that the hardware has in the first place. Attention without SDPA is a baseline and not offered."""
        if options is None or options.prefer == EAGER or not context.model.supports_sdpa:
            return []
        kernels, _ = runnable(("flash", "efficient", "cudnn", "math"), context.hardware)
        orders = [list(options.prefer), *([kernel, *(k for k in kernels if k != kernel)] for kernel in kernels)]
        by_first: dict[str, list[Kernel]] = {}
        for order in orders:
            by_first.setdefault(order[0], order)
        choices = tuple(hw.Choice(changes={"prefer": order}) for order in by_first.values())
        return [hw.Scale(choices=choices, present=0, ordered=False, tune=True)] if len(choices) > 1 else []

    def evidence(self, run: hw.RunView) -> hw.Evidence:
        implementation = getattr(getattr(run.inner_model, "config", None), "_attn_implementation", None)
        forward = {name: count for name, count in run.observation.operators.items() if "backward" not in name}
        if not forward:
            return hw.Evidence.unknown(f"attn_implementation {implementation}; no operators were recorded")
        calls = {kernel: sum(forward[name] for name in forward if name.startswith(op)) for kernel, op in OPERATORS.items()}
        calls = {kernel: count for kernel, count in calls.items() if count}
        ran = ", ".join(f"{kernel} {count}" for kernel, count in calls.items()) or "no attention kernel"
        seen = f"attn_implementation {implementation}; calls in this step: {ran}"
        modules = {name: kernels_in(ran) for name, ran in run.observation.attention.items()}
        kernels = Counter(kernel for own in modules.values() for kernel in own)
        for kernel, count in kernels.most_common()[1:]:
            where = hw.first_names([name for name, own in modules.items() if kernel in own])
            seen += f"; {kernel} in {count} of {len(modules)} layers: {where}"
        found = {*kernels} or {*calls} or {"eager"}  # a second model, such as a reference or a guide, may run another kernel
        if "math" in calls and run.device.type == "cpu":
            biased = with_trained_bias(run.inner_model, modules)
            if calls["math"] == sum(run.observation.forward_calls[name] for name in biased):
                found.remove("math")
                seen += "; math where position biases are trained: on a CPU flash computes no gradient for them"
        return hw.Evidence.active(seen, kernel=frozenset(found))

    def expects(self) -> Mapping[str, Any]:
        first, *rest = self.options.prefer
        # a mask, dropout or a head size rules kernels out, and then another one of the list runs; math can always run
        return {"kernel": first if first in ("eager", "math") else frozenset({first, *rest} - {"math"})}


def kernels_in(operators: Iterable[str]) -> set[str]:
    """The kernels among the `operators` of a layer's attention: "eager" for a softmax alone."""
    operators = list(operators)
    return {kernel for kernel, begin in OPERATORS.items() if any(name.startswith(begin) for name in operators)} or (
        {"eager"} if operators and all("softmax" in name for name in operators) else set()
    )


def with_trained_bias(model: Any, attention: Iterable[str]) -> list[str]:
    """Those of the modules `attention` that add a trained table of positions to their scores, as T5's do.

    One self-attention of each stack holds the table, and the other layers of the stack use it too. With checkpointing T5 also
    computes a gradient of the zeros that its cross-attention adds.
    """
    t5 = {name: module for name in attention if hasattr(module := model.get_submodule(name), "has_relative_attention_bias")}
    kinds = {name: name.rpartition(".")[2] for name in t5}
    tables = [name for name, module in t5.items() if module.has_relative_attention_bias]
    trained = {kinds[name] for name in tables if t5[name].relative_attention_bias.weight.requires_grad}
    return [name for name, module in t5.items() if kinds[name] in trained or getattr(module, "gradient_checkpointing", False)]
