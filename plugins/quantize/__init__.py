"""Quantization for QLoRA: stores the frozen weights of linear layers in 4 or 8 bit, below a trained adapter.

bitsandbytes quantizes the weights. Embeddings, norm layers and the output head keep their precision. The model is loaded into
host memory; each layer is quantized when it moves to the device. After training the adapter is merged into dequantized weights.
Memory of a quantized weight: 0.516 bytes in 4 bit (0.5625 without double quantization), 1 byte in 8 bit.

Source: QLoRA, NF4 in blocks of 64 with double-quantized scales, Dettmers et al. 2023 (arXiv:2305.14314); LLM.int8(), Dettmers et
al. 2022 (arXiv:2208.07339); LoftQ (`plugins.adapter.init_lora_weights`), Li et al. 2023 (arXiv:2310.08659).
Hardware: CUDA, or a CPU (slow).
Cost: every product dequantizes its weight; a step takes about 1.3 times as long.
Numerical effect: changes the model. Weights are rounded to 16 (4 bit) or 255 (8 bit) values per block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from hwopt import plugin as hw
from hwopt.hardware.device import GIB

BYTES = {8: 1.0, 4: 0.5 + 4 / 64}
"""Bits -> bytes per weight, with a 32-bit scale for each block of 64 weights in 4 bit."""
DOUBLE_QUANTIZED_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
SMALL_PART = 0.01
"""Weights that stay unquantized are reported if they are a larger part of the model: not for small convolutions."""


Child = tuple[Any, str, Any]
"""(parent module, attribute, module)."""


def children(model: Any) -> Iterator[Child]:
    """Every module inside of `model`, with its parent."""
    return ((parent, name, child) for parent in model.modules() for name, child in parent.named_children())


def frozen_linears(model: Any) -> list[Child]:
    """The linear layers that do not require gradients, except the output head, which an adapter may have wrapped.

    Also except those whose inputs the model casts to the dtype of their weights, which packed bytes do not have: T5's `wo`.
    """
    import torch

    head, plain = model.get_output_embeddings(), {*(getattr(model, "_keep_in_fp32_modules", None) or ())}
    kept = set() if head is None else set(head.modules())
    kept |= {layer for name, module in model.named_modules() if plain & {*name.split(".")} for layer in module.modules()}
    linears = [child for child in children(model) if type(child[2]) is torch.nn.Linear and child[2] not in kept]
    return [child for child in linears if not child[2].weight.requires_grad]


def packed_linears(model: Any) -> list[Child]:
    """The quantized linear layers."""
    from bitsandbytes import nn

    return [child for child in children(model) if isinstance(child[2], (nn.Linear4bit, nn.Linear8bitLt))]


def quantize_linear(layer: Any, options: Quantize.Options, run: hw.RunView) -> Any:
    """A linear layer of bitsandbytes on the run's device, with the quantized weight of `layer`."""
    import torch
    from bitsandbytes import nn
    from torch._subclasses.fake_tensor import FakeTensor

    bits, double = options.bits, options.double
    dtype = getattr(torch, DTYPES[options.dtype])
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
        packed.support_avx512bf16_for_cpu = False  # evaluation on such a CPU would reorder the packed weights
    else:
        packed = nn.Linear8bitLt(*shape, has_fp16_weights=False, threshold=6.0, **settings)
        packed.forward = partial(by_rows, packed.forward)
        weight = nn.Int8Params(layer.weight.data, requires_grad=False, has_fp16_weights=False)
    packed.weight = weight.to(run.device)
    if state := getattr(packed.weight, "quant_state", None):  # of 4 bits
        state.dtype = dtype  # else each product would unpack its weight in the dtype of the file, and then copy it
    if layer.bias is not None:
        packed.bias = torch.nn.Parameter(layer.bias.data.to(run.device), requires_grad=False)
    return packed.train(layer.training)


def bitsandbytes_config(options: Quantize.Options) -> Any:
    """The same as an argument of `from_pretrained`."""
    from transformers import BitsAndBytesConfig

    if options.bits == 8:
        return BitsAndBytesConfig(load_in_8bit=True)
    four = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": options.double}
    return BitsAndBytesConfig(bnb_4bit_compute_dtype=DTYPES[options.dtype], **four)


def by_rows(forward: Callable[[Any], Any], inputs: Any) -> Any:
    """`forward` of the rows of `inputs` (…, features), of which bitsandbytes 0.50 on a CPU takes up to three dimensions."""
    return forward(inputs) if inputs.dim() <= 3 else forward(inputs.flatten(0, -2)).unflatten(0, inputs.shape[:-1])


def take_up_rounding(adapted: Any, weight: Any) -> None:
    """LoftQ with one iteration: the adapter of a layer starts as the best approximation of `weight` less the quantized weight.

    `adapted` is a LoRA layer of PEFT around the quantized layer; `weight` has shape (outputs, inputs), before quantization.
    """
    import torch
    from peft.utils.integrations import dequantize_module_weight

    rounded = dequantize_module_weight(adapted.get_base_layer()).detach().float()
    lost = weight.to(rounded) - rounded
    for name, first in adapted.lora_A.items():
        rank = min(first.out_features, *lost.shape)
        left, values, right = torch.svd_lowrank(lost, q=rank, niter=4)
        scale = (values / adapted.scaling[name]).sqrt()
        with torch.no_grad():
            first.weight[:rank].copy_((right * scale).T)
            adapted.lora_B[name].weight[:, :rank].copy_(left * scale)


def quantize(model: Any, run: hw.RunView, *, options: Quantize.Options) -> Any:
    """`model` with its frozen linear layers quantized and all other weights in fp32, which [plugins.precision] may cast."""
    from torch._subclasses.fake_tensor import FakeTensor

    loftq = [config for config in getattr(model, "peft_config", {}).values() if config.init_lora_weights == "loftq"]
    for parent, name, layer in frozen_linears(model):
        setattr(parent, name, quantize_linear(layer, options, run))
        if loftq and hasattr(parent, "lora_A") and not isinstance(layer.weight.data, FakeTensor):
            take_up_rounding(parent, layer.weight.data)
    for config in loftq:
        config.init_lora_weights = True  # done; a saved adapter is loaded without it
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.float()
    return model


def frozen_matrices(model: Any) -> list[Any]:
    """The frozen matrices outside of linear layers, embeddings and the output head, such as the weights of fused experts."""
    from torch import nn

    return [
        parameter
        for module in model.modules()
        if not isinstance(module, (nn.Linear, nn.Embedding))
        for parameter in module.parameters(recurse=False)
        if parameter.dim() > 1 and not parameter.requires_grad
    ]


def dequantize(model: Any, run: hw.RunView) -> Any:
    """`model` with plain fp32 linear layers, in host memory: the dequantized model may not fit on the device."""
    import torch
    from peft.utils.integrations import dequantize_module_weight

    for parent, name, packed in packed_linears(model):
        if state := getattr(packed.weight, "quant_state", None):
            state.dtype = torch.float32
        layer = torch.nn.Linear(packed.in_features, packed.out_features, bias=packed.bias is not None, device="meta")
        layer.weight = torch.nn.Parameter(dequantize_module_weight(packed).detach().float().cpu(), requires_grad=False)
        if packed.bias is not None:
            layer.bias = torch.nn.Parameter(packed.bias.detach().float().cpu(), requires_grad=False)
        setattr(parent, name, layer)
    return model.cpu().float()


def bytes_per_weight(options: Quantize.Options) -> float:
    """The bytes of a quantized weight, with its share of the scales."""
    return DOUBLE_QUANTIZED_BYTES if options.bits == 4 and options.double else BYTES[options.bits]


def unpacked_weights(model: hw.ModelFacts) -> dict[str, int]:
    """Name -> number of weights that bitsandbytes cannot quantize and that are a large part of `model`, such as fused experts."""
    return {name: number for name, number in model.other_weights.items() if number > SMALL_PART * model.parameters}


class Quantize(hw.Plugin):
    name = "quantize"
    stage = hw.Stage.MODEL
    effect = "method"
    aliases: ClassVar[Mapping[str, str | hw.Alias]] = {
        "load_in_4bit": "bits = 4",
        "load_in_8bit": "bits = 8",
        "bnb_4bit_use_double_quant": "double",
        "bnb_4bit_compute_dtype": hw.Alias("dtype", lambda value: {"dtype": hw.dtype_name(value)}),
        "quantization_config": "enabled = true",
    }
    relations = hw.Relations(
        after=("adapter",),  # weights that the adapter trains are not quantized
        requires=("adapter",),
        conflicts=(
            hw.Conflict(
                lacks="packed_weights",
                why="quantized weights are packed bytes, which the engine cannot shard or offload; keep one of the two tables",
            ),
            hw.Conflict(
                plugin="adapter",
                why='PEFT loses the scales of 8-bit weights with DoRA; set bits = 4, or kind = "lora" in [plugins.adapter]',
                when=lambda quantize, adapter: quantize.bits == 8 and adapter.kind == "dora",
            ),
        ),
    )

    class Options(hw.PluginOptions):
        bits: Literal[4, 8] = 4
        """4: NF4 in blocks of 64; 8: LLM.int8()."""
        double: bool = True
        """4 bit only: also quantize the block scales."""
        # may change, because "auto" depends on the hardware
        dtype: Annotated[Literal["auto", "bf16", "fp16", "fp32"], hw.MayChangeOnResume()] = "auto"
        """4 bit only: dtype of products with dequantized weights; "auto": bf16, fp16 or fp32."""

    options: Options

    def probe(self, context: hw.Context) -> hw.Decision:
        if not context.has("bitsandbytes"):
            return hw.Decision.skip("bitsandbytes is not installed")
        asked: Any = self.options.dtype
        can = context.hardware.can(asked) if asked in ("bf16", "fp16") else None
        dtype = context.hardware.best_dtype()[0] if asked == "auto" or (can is not None and not can) else asked
        chosen = self.options.changed(dtype=dtype)
        what = f"4 bit (NF4), {bytes_per_weight(chosen):.3f} bytes per weight; products in {dtype}"
        if chosen.bits == 8:
            what = "8 bit (LLM.int8()), 1 byte per weight"
        reason = f"frozen linear layers in {what}"
        if unpacked := unpacked_weights(context.model):
            total = sum(unpacked.values())
            reason += f"; NOT quantized: {total:,} weights outside of linear layers, {4 * total / GIB:.2f} GiB in fp32 or "
            reason += f"{2 * total / GIB:.2f} GiB in half precision: {', '.join(unpacked)}"
        if self.options.bits == 4 and can is not None and not can:
            return hw.Decision.fallback(chosen, f"{asked}: {can.reason}; {reason}")
        return hw.Decision.apply(reason, chosen)

    def apply(self, recipe: hw.Recipe, context: hw.Context) -> None:
        recipe.model_kwargs["dtype"] = "auto"  # the dtype of the file: fp32 would need twice the host memory
        recipe.model_steps.append(partial(quantize, options=self.options))
        recipe.trainer["quantization_config"] = partial(bitsandbytes_config, self.options)
        recipe.final_steps.append(dequantize)

    def memory(self, spec: hw.MemorySpec, context: hw.Context) -> None:
        model = context.model
        embeddings = 2 * model.vocab_size * model.hidden_size  # input embeddings and output head
        spec.packed = max(spec.parameters - embeddings - sum(model.other_weights.values()), 0)
        spec.packed_bytes = spec.packed * bytes_per_weight(self.options)
        spec.unpacked = unpacked_weights(model)

    @classmethod
    def alternatives(cls, options: Any | None, context: hw.Context) -> list[hw.Scale]:
        if options is not None and options.bits == 4:
            return []
        note = "rounds the frozen weights to 4 bit (needs [plugins.adapter])"
        four_bit = hw.Choice(changes={"bits": 4}, note=note, time=1.3, alters=True)
        return [hw.Scale(choices=(four_bit, hw.Choice(changes={"bits": 8}) if options else hw.OFF), present=1)]

    def evidence(self, run: hw.RunView) -> hw.Evidence:
        layers = [layer for _, _, layer in packed_linears(run.inner_model)]
        names = {id(module): name for name, module in run.inner_model.named_modules()}
        kinds = sorted({f"{type(layer).__name__} in {str(layer.weight.dtype).removeprefix('torch.')}" for layer in layers})
        size = sum(layer.weight.numel() * layer.weight.element_size() for layer in layers)
        elements = sum(layer.in_features * layer.out_features for layer in layers)
        missed = [names[id(layer)] for _, _, layer in frozen_linears(run.inner_model)]
        seen = f"{len(layers)} layers: {', '.join(kinds) or 'none'}; {size:,} bytes for {elements:,} weights; "
        seen += f"{len(missed)} not quantized{': ' if missed else ''}{hw.first_names(missed)}"
        if others := frozen_matrices(run.inner_model):
            seen += f"; {sum(p.nbytes for p in others):,} bytes in {len(others)} matrices outside of linear layers not quantized"
        bits = {round(8 * each.weight.nbytes / (each.in_features * each.out_features)) for each in layers}
        return hw.Evidence.of(layers and not missed, seen, bits=frozenset(bits or {32}))

    def expects(self) -> Mapping[str, Any]:
        return {"bits": self.options.bits}
