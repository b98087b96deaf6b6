"""The dtypes of weights and products in a running model, for the evidence of the plugin."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from hwopt import plugin as hw
from hwopt_plugins.precision.half_weights import CAST, is_norm

PROFILER_NAMES = {"fp16": "c10::Half", "bf16": "c10::BFloat16", "fp32": "float"}
"""Dtype -> its name in torch's profiler."""


def dtypes_in_use(run: hw.RunView) -> hw.Evidence:
    """The evidence of the plugin."""
    dtypes = run.observation.matmul_dtypes
    matmuls = {name: dtypes.get(recorded, 0) for name, recorded in PROFILER_NAMES.items()}
    weights = count_dtypes(run.inner_model.parameters())
    stepped = count_dtypes(run.engine.parameters)
    scale = run.engine.loss_scale()
    counted = ", ".join(f"{count} in {name}" for name, count in matmuls.items() if count) or "none in fp16, bf16 or fp32"
    seen = f"{sum(dtypes.values())} matmuls: {counted}; weights {weights}; the optimizer steps on {stepped}; "
    seen += "no loss scale" if scale is None else f"loss scale {scale.item():g}"
    if not dtypes:
        return hw.Evidence.unknown(f"no matmuls were recorded; {seen}")
    linear, fell_out = linear_layers(run)
    frozen = frozen_in_fp32(run)
    seen += f"; {fell_out}" if fell_out else ""
    seen += f"; {len(frozen)} frozen layers are stored in fp32: {hw.first_names(frozen)}" if frozen else ""
    in_half, in_fp32 = half_weights(run.inner_model)
    seen += f"; {len(in_fp32)} trained weights are in fp32: {hw.first_names(in_fp32)}" if in_half and in_fp32 else ""
    return hw.Evidence.active(
        seen,
        **{f"{name}_matmuls": count > 0 for name, count in matmuls.items()},
        linear_layers=linear,
        frozen_in_fp32=len(frozen),
        half_weights=False if run.engine.keeps_masters else frozenset([True] * bool(in_half) + [False] * bool(in_fp32)),
        updated="/".join(sorted(stepped)),
        loss_scale=scale is not None,
    )


def linear_layers(run: hw.RunView) -> tuple[frozenset[str], str]:
    """(dtypes of the products of all linear layers, which layers computed in fp32 although others did not).

    Both are empty if the layers could not be observed. Layers that transformers keeps in fp32 do not count.
    """
    short = {recorded: name for name, recorded in PROFILER_NAMES.items()}
    kept = {*(getattr(run.inner_model, "_keep_in_fp32_modules", None) or ())}
    layers = {
        name: {short.get(dtype, dtype) for dtype in dtypes}
        for name, dtypes in run.observation.linear_dtypes.items()
        if dtypes and kept.isdisjoint(name.split("."))
    }
    found = frozenset(dtype for dtypes in layers.values() for dtype in dtypes)
    fp32 = [name for name, dtypes in layers.items() if "fp32" in dtypes]
    if not fp32 or found == {"fp32"}:
        return found, ""
    return found, f"{len(fp32)} of {len(layers)} linear layers computed in fp32: {hw.first_names(fp32)}"


def frozen_in_fp32(run: hw.RunView) -> list[str]:
    """The names of the linear layers that `cast_frozen` had to cast and that are in fp32."""
    if not hasattr(run.inner_model, CAST):
        return []
    named = dict(run.inner_model.named_modules())
    tied = {id(module.weight) for module in named.values() if isinstance(module, torch.nn.Embedding)}  # in fp32 beside fp16
    weights = [(name, module.weight) for name, module in named.items() if type(module) is torch.nn.Linear]
    weights = [(name, weight) for name, weight in weights if not weight.requires_grad and id(weight) not in tied]
    return [name for name, weight in weights if weight.dtype == torch.float32]


def half_weights(model: Any) -> tuple[list[str], list[str]]:
    """The names of the trained weights in half precision, and of those in fp32, without the weights of norms."""
    norms = {id(p) for module in model.modules() if is_norm(module) for p in module.parameters()}
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad and id(p) not in norms]
    in_half = [name for name, p in trained if p.dtype in (torch.float16, torch.bfloat16)]
    return in_half, [name for name, p in trained if p.dtype == torch.float32]


def count_dtypes(parameters: Any) -> dict[str, int]:
    """Name of a dtype -> the number of elements of `parameters` with it."""
    counts = Counter[str]()
    for p in parameters:
        counts[str(p.dtype).removeprefix("torch.")] += p.numel()
    return dict(counts)
