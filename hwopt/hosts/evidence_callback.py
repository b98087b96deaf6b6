"""`Evidence`: a callback for any Trainer that says after the first step what really ran, with or without a profile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import torch
from transformers import TrainerCallback

from hwopt.errors import PluginError
from hwopt.plugin import Observation
from hwopt.text import listing
from hwopt.training import evidence

KERNELS = {
    "aten::_scaled_dot_product_flash_attention": "flash",
    "aten::_flash_attention_forward": "flash",
    "aten::_scaled_dot_product_efficient_attention": "efficient",
    "aten::_scaled_dot_product_cudnn_attention": "cudnn",
    "aten::_scaled_dot_product_attention_math": "math",
    "flash_attn": "flash_attn",
}
"""Beginning of an operator's name -> the attention kernel."""
PRODUCTS = {"bf16": "c10::BFloat16", "fp16": "c10::Half"}
"""Argument -> the dtype of the matrix products that it asks for, as torch's profiler names it."""

EvidenceLine = tuple[str, str, str]
"""(what, status, what was seen). Status: "active", "inactive", "off" if nobody asks for it, "unknown"."""


class Evidence(TrainerCallback):
    """Prints after the first step what ran: attention kernel, dtypes, optimizer, checkpointing, compilation, TF32.

    With `strict`, raises PluginError if something that the arguments ask for did not run. `found` has what was seen.
    """

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict
        self.found: list[EvidenceLine] = []
        self.run = SimpleNamespace(inner_model=None, observation=Observation())
        self._observing: ExitStack | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        if self._observing is None and not self.found:
            model = objects["model"]
            self.run.inner_model = getattr(model, "_orig_mod", model)
            self._observing = ExitStack()
            self._observing.enter_context(evidence.observing(self.run))

    def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        if self._observing is None:
            return
        self.on_train_end(args, state, control)
        optimizer = objects.get("optimizer")
        self.found = list(findings(args, objects["model"], getattr(optimizer, "optimizer", optimizer), self.run.observation))
        if missing := self.run.observation.missing:
            self.found = [(what, "off" if status == "off" else "unknown", missing) for what, status, _ in self.found]
        if state.is_world_process_zero:
            for what, status, seen in self.found:
                print(f"hwopt: after step {state.global_step}: {status:8} {what}: {seen}", flush=True)
        missing = [f"{what} ({seen})" for what, status, seen in self.found if status == "inactive"]
        if self.strict and missing:
            raise PluginError(f"asked for, and not active: {'; '.join(missing)}")

    def on_train_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        if self._observing is not None:
            self._observing.close()
            self._observing = None


def line(what: str, asked: object, ran: object, seen: str) -> EvidenceLine:
    """`ran`: None if that is not known."""
    return what, "off" if not asked else "unknown" if ran is None else "active" if ran else "inactive", seen


def findings(args: Any, model: Any, optimizer: Any, seen: Observation) -> Iterator[EvidenceLine]:
    """What the first step shows of each optimization. "inactive": the arguments or the model ask for it, and it did not run."""
    yield from (attention(model, seen), precision(args, seen), updates(args, optimizer, seen), checkpointing(args, seen))
    asked, graphs = getattr(args, "torch_compile", False), seen.calls("CompiledFxGraph", "Torch-Compiled Region")
    compiled = sum(each._compiled_call_impl is not None for each in model.modules())
    said = f"torch_compile = {asked}; {compiled} compiled module(s), {graphs} call(s) of compiled graphs"
    yield line("compile", asked, graphs, said)
    if getattr(args, "tf32", None) is not None:
        matmul = torch.backends.cuda.matmul.fp32_precision
        said = f"matmul {matmul}, {seen.matmul_dtypes.get('float', 0)} matmuls in fp32"
        yield line("tf32", True, matmul == "tf32" or not args.tf32, said)
    if getattr(args, "use_liger_kernel", False):
        places = ((each, type(each).__module__ + getattr(each.forward, "__module__", "")) for each in model.modules())
        own = sorted({type(each).__name__ for each, place in places if "liger_kernel" in place})
        yield line("use_liger_kernel", True, own, f"modules of Liger: {listing(own) or 'none'}")


def attention(model: Any, seen: Observation) -> EvidenceLine:
    asked = getattr(getattr(model, "config", None), "_attn_implementation", None)
    calls: dict[str, int] = {}
    for name, count in seen.operators.items():
        kernel = next((kernel for begin, kernel in KERNELS.items() if name.startswith(begin)), None)
        if kernel is not None and "backward" not in name:
            calls[kernel] = max(count, calls.get(kernel, 0))
    ran = ", ".join(f"{kernel} {count}" for kernel, count in calls.items()) or "no attention kernel"
    known = calls if seen.operators else None
    return line("attention", asked not in (None, "eager"), known, f"attn_implementation {asked}; {ran}")


def precision(args: Any, seen: Observation) -> EvidenceLine:
    wanted = next((word for word in PRODUCTS if getattr(args, word, False)), None)
    shown = ", ".join(f"{count} {name.removeprefix('c10::')}" for name, count in sorted(seen.matmul_dtypes.items())) or "none"
    said = f"{wanted or 'fp32'} asked; matmuls: {shown}"
    if wanted is None or not seen.matmul_dtypes:
        return line("precision", wanted, None, said)
    if others := [name for name, dtypes in seen.linear_dtypes.items() if dtypes - {PRODUCTS[wanted]}]:
        said += f"; in another dtype: {listing(others)}"
    return line("precision", True, not others and seen.matmul_dtypes.get(PRODUCTS[wanted], 0), said)


def updates(args: Any, optimizer: Any, seen: Observation) -> EvidenceLine:
    asked = getattr(args.optim, "value", args.optim)
    fused = seen.calls("_fused_adam", "_fused_sgd", "_fused_adagrad")
    said = f"optim {asked}: {type(optimizer).__module__.partition('.')[0]}'s {type(optimizer).__name__}, {fused} fused update(s)"
    wrong = ("fused" in asked and not fused) or ("8bit" in asked and "torch." in type(optimizer).__module__)
    return line("optimizer", True, not wrong, said)


def checkpointing(args: Any, seen: Observation) -> EvidenceLine:
    """The modules inside a layer that is recomputed are called twice for each call of the model."""
    asked = getattr(args, "gradient_checkpointing", False) or getattr(args, "activation_checkpointing", False)
    calls = seen.forward_calls
    numbered = [(name, [part.isdigit() for part in name.split(".")]) for name in calls]
    layers = [name for name, digits in numbered if digits[-1] and not any(digits[:-1])]
    most = {layer: max(count for name, count in calls.items() if f"{name}.".startswith(f"{layer}.")) for layer in layers}
    once = [layer for layer in layers if most[layer] <= calls.get("", 0)]
    if not layers:
        return line("checkpointing", asked, None, "the layers were not counted")
    said = f"{len(layers) - len(once)} of {len(layers)} layers recomputed"
    return line("checkpointing", asked, not once, f"{said}; not {listing(once)}" if asked and once else said)
