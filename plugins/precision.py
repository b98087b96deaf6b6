"""Half precision: autocast over fp32 weights (O1), or half weights with fp32 masters (O2). The names are Apex's, the code is not.

O1: products in fp16 or bf16, the rest in fp32; Accelerate's autocast. O2: weights, activations and gradients are half, the
optimizer steps on fp32 masters, norm layers keep fp32 weights and compute in fp32; softmax is fp32 inside every SDPA kernel
and the task's loss is fp32. fp16 scales the loss. Source: Micikevicius et al. 2018 (arXiv:1710.03740); Kalamkar et al. 2019 on
bf16 (arXiv:1905.12322). Hardware: fp16 from compute capability 7.0, bf16 from 8.0 or a CPU with AMX/AVX512-BF16.
Cost: none; O2 saves activations and traffic, not state (16 bytes a parameter with AdamW either way).
Numerical effect: products keep 11 (fp16) or 8 (bf16) bits; O2 also adds up the gradients of micro-batches in half.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

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

PROFILER_NAMES = {"fp16": "c10::Half", "bf16": "c10::BFloat16", "fp32": "float"}


def best_dtype(hardware: Hardware) -> tuple[Literal["fp16", "bf16", "fp32"], str]:
    """bf16 where the hardware computes it fast, else fp16, else fp32; and why not the better ones."""
    bf16, fp16 = hardware.can("bf16"), hardware.can("fp16")
    if bf16:
        return "bf16", bf16.reason
    return ("fp16", f"{fp16.reason}; bf16 {bf16.reason}") if fp16 else ("fp32", f"bf16: {bf16.reason}; fp16: {fp16.reason}")


def is_norm(module: Any) -> bool:
    """Normalisation layers of torch and transformers, by their class name: LayerNorm, LlamaRMSNorm, BatchNorm1d …"""
    return "Norm" in type(module).__name__ and next(module.children(), None) is None


class HalfWeights:
    """The half weights of one model with fp32 masters of those that are trained.

    `cast` keeps the loaded fp32 values as masters, so that nothing is rounded away; `swap_in` gives the masters to the
    optimizer; `collect` and `publish` carry gradients to them and weights back; `restore` ends it.
    """

    def __init__(self, dtype: str) -> None:
        self.dtype = {"fp16": "float16", "bf16": "bfloat16"}[dtype]
        self.masters: dict[Any, Any] = {}  # half parameter -> fp32 parameter, in the order of the model
        self.hooks: list[Any] = []
        self.halves: list[tuple[Any, str, Any]] = []  # module, name, half parameter while an evaluation borrows the masters
        self.autocast: Any = None

    def cast(self, model: Any, run: RunView | None = None) -> Any:
        import torch

        half: torch.dtype = getattr(torch, self.dtype)
        for module in model.modules():
            if is_norm(module):
                self.hooks.append(module.register_forward_pre_hook(partial(_cast_inputs, torch.float32)))
                self.hooks.append(module.register_forward_hook(partial(_cast_output, half)))
                continue
            for p in module.parameters(recurse=False):  # buffers stay: rotary frequencies and counters need their bits
                if p.dtype == torch.float32:
                    if p.requires_grad:
                        self.masters[p] = torch.nn.Parameter(p.data)
                    p.data = p.data.to(half)
        self.hooks.append(model.register_load_state_dict_pre_hook(self._load_masters))
        return model

    def _load_masters(self, model: Any, state_dict: Any, prefix: str, *_: Any) -> None:
        # what `export` wrote is fp32: loading it into the half weights alone would round the masters away
        for name, p in model.named_parameters(remove_duplicate=False):
            if p in self.masters and prefix + name in state_dict:
                self.masters[p].data.copy_(state_dict[prefix + name])

    def swap_in(self, optimizer: Any, run: RunView | None = None) -> Any:
        for p, master in self.masters.items():
            master.data = master.data.to(p.device)  # the model has moved since
        for group in optimizer.param_groups:
            group["params"] = [self.masters.get(p, p) for p in group["params"]]
        return optimizer

    def collect(self) -> None:
        """Move the half gradients into the masters as fp32; the half ones are freed."""
        import torch

        halves = [p for p in self.masters if p.grad is not None]
        if not halves:
            return
        gradients = [torch.empty_like(self.masters[p]) for p in halves]
        torch._foreach_copy_(gradients, [p.grad for p in halves])
        for p, gradient in zip(halves, gradients, strict=True):
            self.masters[p].grad, p.grad = gradient, None

    def publish(self) -> None:
        """Round the masters into the half weights that the model computes with."""
        import torch

        torch._foreach_copy_([p.data for p in self.masters], [master.data for master in self.masters.values()])

    def export(self, state_dict: dict[str, Any], run: RunView) -> dict[str, Any]:
        """`state_dict` of the model with the masters in place of the half weights."""
        named = run.inner_model.named_parameters(remove_duplicate=False)
        found = {name: self.masters[p].detach() for name, p in named if p in self.masters and name in state_dict}
        return {**state_dict, **found}

    def evaluate_in_full(self, run: RunView) -> None:
        """Evaluation on the masters under autocast (fp16_full_eval = false), until `train_in_half`."""
        import torch

        # the Parameter objects, not their data: DDP's hooks hang on the half ones, and another dtype would drop them
        self.halves = [
            (module, name, p)
            for module in run.inner_model.modules()
            for name, p in module.named_parameters(recurse=False)
            if p in self.masters
        ]
        for module, name, p in self.halves:
            setattr(module, name, self.masters[p])
        self.autocast = torch.autocast(run.device.type, dtype=getattr(torch, self.dtype))
        self.autocast.__enter__()

    def train_in_half(self, run: RunView) -> None:
        self.autocast.__exit__(None, None, None)
        for module, name, p in self.halves:
            setattr(module, name, p)
        self.halves = []

    def restore(self, model: Any, run: RunView | None = None) -> Any:
        """The model in fp32 with the masters as its weights; no hook is left."""
        for hook in self.hooks:
            hook.remove()
        for p in model.parameters():
            if p.is_floating_point():  # packed weights are bytes
                p.data = self.masters[p].data if p in self.masters else p.data.float()
        self.masters, self.hooks = {}, []
        return model


def _cast_inputs(dtype: Any, module: Any, inputs: Any) -> Any:
    return tuple(x.to(dtype) if hasattr(x, "is_floating_point") and x.is_floating_point() else x for x in inputs)


def _cast_output(dtype: Any, module: Any, inputs: Any, output: Any) -> Any:
    return output.to(dtype)


def gradient_scaler(device_type: str) -> Any:
    import torch

    return torch.amp.GradScaler(device_type)


class Precision(Plugin):
    name = "precision"
    stage = Stage.MODEL
    after = ("adapter", "quantize")  # adapters are cast with the rest, and get masters of their own
    preserves = "rounding"
    conflicts = (
        Conflict(
            lacks="whole_gradients",
            why="O2 moves half gradients to fp32 masters before the update, and such an engine keeps the masters itself; "
            'set level = "O1"',
            when=lambda precision, engine: precision.level == "O2" and precision.dtype != "fp32",
        ),
    )
    aliases: ClassVar[Mapping[str, str]] = {
        "fp16": "dtype = 'fp16'",
        "bf16": "dtype = 'bf16'",
        "mixed_precision": "dtype",
        "torch_dtype": "dtype",
        "fp16_opt_level": "level",
    }

    class Options(PluginOptions):
        dtype: Literal["auto", "fp16", "bf16", "fp32"] = Field(
            default="auto", description='"auto": bf16 where the hardware has it, else fp16, else fp32.'
        )
        level: Literal["O1", "O2"] = Field(
            default="O1", description="O1: autocast over fp32 weights. O2: half weights, fp32 masters."
        )
        full_eval: bool = Field(
            default=False, description="O2: evaluate with the half weights; false evaluates with the fp32 masters under autocast."
        )

        @model_validator(mode="after")
        def half_weights_to_evaluate_with(self) -> Precision.Options:
            if self.full_eval and self.level == "O1":
                raise ValueError(
                    'full_eval = true needs half weights, which only level = "O2" has; set that, or leave full_eval out'
                )
            return self

    options: Options

    def probe(self, context: Context) -> Decision:
        asked, hardware = self.options.dtype, context.hardware
        if asked == "fp32" or (asked != "auto" and hardware.can(asked)):
            return Decision.apply("full precision" if asked == "fp32" else f"{self.options.level}: {hardware.can(asked).reason}")
        dtype, reason = best_dtype(hardware)
        to = self.Options(dtype="fp32") if dtype == "fp32" else self.options.model_copy(update={"dtype": dtype})
        if asked == "auto":
            return Decision.apply(f"{dtype}: {reason}", to)
        return Decision.fallback(to, f"{asked}: {hardware.can(asked).reason}; takes {dtype}")

    def apply(self, recipe: Recipe, context: Context) -> None:
        dtype = self.options.dtype
        assert dtype != "auto", "probe() decides it"
        recipe.model_kwargs.setdefault("dtype", "float32")  # transformers 5 would take whatever the file has
        half_weights = dtype != "fp32" and self.options.level == "O2"
        recipe.accelerator["mixed_precision"] = "no" if dtype == "fp32" or half_weights else dtype
        if dtype != "fp32" and context.hardware.device_type == "cuda":
            recipe.batch["pad_to_multiple_of"] = 8  # tensor cores want it
        if half_weights:
            weights = HalfWeights(dtype)
            recipe.model_steps.append(weights.cast)
            recipe.optimizer_wraps.append(weights.swap_in)
            recipe.masters = weights
            if not self.options.full_eval:
                recipe.events["evaluate_begin"].append(weights.evaluate_in_full)
                recipe.events["evaluate_end"].append(weights.train_in_half)
            recipe.export_steps.append(weights.export)
            recipe.final_steps.append(weights.restore)  # they run in reverse: before an adapter is merged, which would round it
            if dtype == "fp16":
                recipe.scaler = partial(gradient_scaler, context.hardware.device_type)

    def memory(self, spec: MemorySpec, context: Context) -> None:
        if self.options.dtype != "fp32" and self.options.level == "O2":
            spec.weight_bytes, spec.gradient_bytes, spec.master_bytes = 2.0, 2.0, 4.0

    @classmethod
    def memory_options(cls, options: Any | None, context: Context) -> list[MemoryOption]:
        dtype, _ = best_dtype(context.hardware)
        if dtype == "fp32":
            return []
        half = MemoryOption(cls.Options(dtype=dtype), 0.6, f"products in {dtype}")
        weights = MemoryOption(cls.Options(dtype=dtype, level="O2"), 0.95, f"weights and activations in {dtype}, fp32 masters")
        now = "fp32" if options is None or options.dtype == "fp32" else options.level
        return {"fp32": [half, weights], "O1": [weights], "O2": []}[now]

    def evidence(self, run: RunView) -> Evidence:
        import torch

        dtype, matmuls = self.options.dtype, run.observation.matmul_dtypes
        weights = count_dtypes(run.inner_model.parameters())
        stepped = count_dtypes(run.engine.parameters)
        scale = run.engine.loss_scale()
        here = matmuls.get(PROFILER_NAMES[dtype], 0)
        seen = f"{here} of {sum(matmuls.values())} matmuls in {dtype}; weights {weights}; the optimizer steps on {stepped}"
        if dtype == "fp16":
            seen += "; no loss scale" if scale is None else f"; loss scale {scale.item():g}"
        if not matmuls:
            return Evidence.unknown(f"no matmuls were recorded; {seen}")
        in_half = any(p.dtype in (torch.float16, torch.bfloat16) for p in run.inner_model.parameters())
        half_weights = dtype != "fp32" and (self.options.level == "O2" or run.engine.keeps_masters)
        as_told = in_half == half_weights and set(stepped) == {"float32"}
        scaled = (scale is not None) == (dtype == "fp16")
        return Evidence.active(seen) if here and as_told and scaled else Evidence.inactive(seen)


def count_dtypes(parameters: Any) -> dict[str, int]:
    """dtype name -> how many elements of `parameters` have it."""
    counts: dict[str, int] = {}
    for p in parameters:
        name = str(p.dtype).removeprefix("torch.")
        counts[name] = counts.get(name, 0) + p.numel()
    return counts
