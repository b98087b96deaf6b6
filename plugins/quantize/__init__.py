"""QLoRA's base: the frozen weights of linear layers in 4 or 8 bit, under adapters that are trained.

Source: Dettmers et al. 2023, QLoRA (arXiv:2305.14314): NF4 in blocks of 64 with double-quantized scales; Dettmers et al. 2022,
LLM.int8() (arXiv:2208.07339); made by bitsandbytes. Hardware: CUDA, or a CPU (slow). Memory of a quantized weight: .516 bytes
in 4 bit (.5625 without double quantization), 1 in 8 bit. Cost: each product dequantizes its weight, about 1.3 times the step.
Numerical effect: another model: weights are rounded to 16 or 255 values a block. Embeddings, norms and the head stay as they are.
Each layer is quantized on its way to the device; before that the whole model lies in the host's memory, as its file has it.
At the end the weights are dequantized and the adapter is merged into them, so that nothing is rounded a second time.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Literal

from pydantic import Field

from hwopt.hardware.device import Hardware
from hwopt.plugin import (
    Conflict,
    Context,
    Decision,
    Evidence,
    MemoryOption,
    MemorySpec,
    Plugin,
    PluginOptions,
    Recipe,
    RunView,
    Stage,
)

BYTES = {8: 1.0, 4: 0.5 + 4 / 64}
DOUBLE_QUANTIZED_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)


def compute_dtype(hardware: Hardware) -> Literal["bf16", "fp16", "fp32"]:
    """What dequantized weights are multiplied in: half where the hardware is fast at it."""
    return "bf16" if hardware.can("bf16") else "fp16" if hardware.can("fp16") else "fp32"


def frozen_linears(model: Any) -> list[tuple[Any, str, Any]]:
    """(parent, attribute, layer) of every linear layer without a gradient, but for the output head."""
    import torch

    head = model.get_output_embeddings()
    return [
        (parent, name, layer)
        for parent in model.modules()
        for name, layer in parent.named_children()
        if type(layer) is torch.nn.Linear and layer is not head and not layer.weight.requires_grad
    ]


def quantized(layer: Any, bits: int, double: bool, dtype: Any, run: RunView) -> Any:
    """`layer` with its weight packed, on the run's device."""
    import torch
    from bitsandbytes import nn
    from torch._subclasses.fake_tensor import FakeTensor

    if isinstance(layer.weight.data, FakeTensor):
        from hwopt_plugins.quantize.stand_in import PackedLinear

        return PackedLinear(layer, bits, double, dtype, on_host=run.plan.hardware.device_type == "cpu")
    settings: dict[str, Any] = {"bias": layer.bias is not None, "device": "meta"}
    shape = layer.in_features, layer.out_features
    if bits == 4:
        packed = nn.Linear4bit(*shape, compute_dtype=dtype, compress_statistics=double, quant_type="nf4", **settings)
        weight = nn.Params4bit(
            layer.weight.data, requires_grad=False, compress_statistics=double, quant_type="nf4", module=packed
        )
        packed.support_avx512bf16_for_cpu = False  # evaluation would put the weights into another order, for shapes it can take
    else:
        packed = nn.Linear8bitLt(*shape, has_fp16_weights=False, threshold=6.0, **settings)
        weight = nn.Int8Params(layer.weight.data, requires_grad=False, has_fp16_weights=False)
    packed.weight = weight.to(run.device)
    if layer.bias is not None:
        packed.bias = torch.nn.Parameter(layer.bias.data.to(run.device), requires_grad=False)
    return packed.train(layer.training)


def quantize(model: Any, run: RunView, *, bits: int, double: bool, dtype: str) -> Any:
    """`model` with packed frozen layers; what is left is fp32, for the precision of the run to decide."""
    import torch

    compute = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    for parent, name, layer in frozen_linears(model):
        setattr(parent, name, quantized(layer, bits, double, compute, run))
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.float()
    return model


def packed_linears(model: Any) -> list[tuple[Any, str, Any]]:
    from bitsandbytes import nn

    return [
        (parent, name, layer)
        for parent in model.modules()
        for name, layer in parent.named_children()
        if isinstance(layer, (nn.Linear4bit, nn.Linear8bitLt))
    ]


def dequantized(model: Any, run: RunView) -> Any:
    """`model` with plain linear layers again, fp32, in the host's memory: merged on the device it would not fit there."""
    import torch
    from peft.utils.integrations import dequantize_module_weight

    for parent, name, packed in packed_linears(model):
        layer = torch.nn.Linear(packed.in_features, packed.out_features, bias=packed.bias is not None, device="meta")
        layer.weight = torch.nn.Parameter(dequantize_module_weight(packed).detach().float().cpu(), requires_grad=False)
        if packed.bias is not None:
            layer.bias = torch.nn.Parameter(packed.bias.detach().float().cpu(), requires_grad=False)
        setattr(parent, name, layer)
    return model.float().cpu()


class Quantize(Plugin):
    name = "quantize"
    stage = Stage.MODEL
    after = ("adapter",)  # what it leaves trainable is not quantized
    requires = ("adapter",)
    preserves = "method"
    resume_ignores = ("dtype",)  # as the card has it
    aliases: ClassVar[Mapping[str, str]] = {
        "load_in_4bit": "enabled = true",
        "load_in_8bit": "enabled = true",
        "quantization_config": "enabled = true",
    }
    conflicts = (
        Conflict(
            lacks="packed_weights",
            why="quantized weights are packed bytes, which the engine can neither spread nor offload; keep one of the two tables",
        ),
        Conflict(
            plugin="adapter",
            why="DoRA reads every weight in each step, and PEFT then loses 8-bit weights' scales; set bits = 4, or use LoRA",
            when=lambda quantize, adapter: quantize.bits == 8 and adapter.kind == "dora",
        ),
    )

    class Options(PluginOptions):
        bits: Literal[4, 8] = Field(default=4, description="4: NF4, in blocks of 64; 8: LLM.int8().")
        double: bool = Field(default=True, description="4 bit: quantize the scales of the blocks too.")
        dtype: Literal["auto", "bf16", "fp16", "fp32"] = Field(
            default="auto", description='4 bit: what dequantized weights are multiplied in; "auto": the best half precision.'
        )

    options: Options

    def probe(self, context: Context) -> Decision:
        if not context.has("bitsandbytes"):
            return Decision.skip("bitsandbytes is not installed")
        dtype = self.options.dtype
        if dtype == "auto":
            chosen = self.options.model_copy(update={"dtype": compute_dtype(context.hardware)})
            return Decision.apply(self.told(chosen), chosen)
        return Decision.apply(self.told(self.options))

    def told(self, options: Quantize.Options) -> str:
        if options.bits == 8:
            return "frozen linear layers in 8 bit (LLM.int8()), 1 byte a weight"
        each = DOUBLE_QUANTIZED_BYTES if options.double else BYTES[4]
        return f"frozen linear layers in 4 bit (NF4), {each:.3f} bytes a weight; products in {options.dtype}"

    def apply(self, recipe: Recipe, context: Context) -> None:
        recipe.model_kwargs["dtype"] = "auto"  # as the file has it: fp32 would take twice the host's memory
        given = self.options
        recipe.model_steps.append(partial(quantize, bits=given.bits, double=given.double, dtype=given.dtype))
        recipe.final_steps.append(dequantized)

    def memory(self, spec: MemorySpec, context: Context) -> None:
        model = context.model
        outside = 2 * model.vocab_size * model.hidden_size  # embeddings and head
        inside = max(spec.parameters - outside, 0)
        each = DOUBLE_QUANTIZED_BYTES if self.options.bits == 4 and self.options.double else BYTES[self.options.bits]
        spec.weight_bytes = (inside * each + (spec.parameters - inside) * spec.weight_bytes) / spec.parameters

    @classmethod
    def memory_options(cls, options: Any | None, context: Context) -> list[MemoryOption]:
        four = MemoryOption(cls.Options(), 1.3, "rounds the frozen weights to 4 bit (with adapters alone)")
        return [] if options is not None and options.bits == 4 else [four]

    def evidence(self, run: RunView) -> Evidence:
        layers = [layer for _, _, layer in packed_linears(run.inner_model)]
        kinds = sorted({f"{type(layer).__name__} in {str(layer.weight.dtype).removeprefix('torch.')}" for layer in layers})
        held = sum(layer.weight.numel() * layer.weight.element_size() for layer in layers)
        elements = sum(layer.in_features * layer.out_features for layer in layers)
        left = len(frozen_linears(run.inner_model))
        seen = f"{len(layers)} layers: {', '.join(kinds) or 'none'}; {held:,} bytes for {elements:,} weights; {left} left alone"
        packed = held <= elements * self.options.bits / 8 * 1.01
        return Evidence.active(seen) if layers and packed and not left else Evidence.inactive(seen)
