"""Half precision: autocast with fp32 weights (O1), or half-precision weights with fp32 masters (O2).

O1 computes matrix products in fp16 or bf16 and the rest in fp32, with Accelerate's autocast.
O2 stores weights, activations and gradients in half precision, and the optimizer updates fp32 masters. Norm layers keep fp32
weights and compute in fp32. Softmax is fp32 in every SDPA kernel, and the loss of the task is fp32.
fp16 uses a loss scaler. The names O1 and O2 come from Apex; Apex itself is not used.

Source: fp16, Micikevicius et al. 2018 (arXiv:1710.03740); bf16, Kalamkar et al. 2019 (arXiv:1905.12322).
Hardware: fp16 needs compute capability 7.0; bf16 needs 8.0, or a CPU with AMX or AVX512-BF16.
Cost: none. O2 saves activation memory and bandwidth, but no state: both need 16 bytes per parameter with AdamW.
Numerical effect: products keep 11 (fp16) or 8 (bf16) bits; O2 also accumulates micro-batch gradients in half precision.
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
    """(dtype, reason): bf16 if the hardware supports it, else fp16, else fp32; the reason says why the others are not used."""
    bf16, fp16 = hardware.can("bf16"), hardware.can("fp16")
    if bf16:
        return "bf16", bf16.reason
    return ("fp16", f"{fp16.reason}; bf16 {bf16.reason}") if fp16 else ("fp32", f"bf16: {bf16.reason}; fp16: {fp16.reason}")


def is_norm(module: Any) -> bool:
    """Whether `module` is a normalization layer, by its class name: LayerNorm, LlamaRMSNorm, BatchNorm1d."""
    return "Norm" in type(module).__name__ and next(module.children(), None) is None


class HalfWeights:
    """A model's half-precision weights, and fp32 masters of the trained ones.

    `cast` keeps the loaded fp32 values as masters, without rounding. `swap_in` gives the masters to the optimizer. Each step,
    `collect` moves gradients to the masters and `publish` rounds the masters into the weights. `restore` returns to fp32.
    """

    def __init__(self, dtype: str) -> None:
        self.dtype = {"fp16": "float16", "bf16": "bfloat16"}[dtype]
        self.masters: dict[Any, Any] = {}  # half parameter -> fp32 parameter, in the order of the model
        self.hooks: list[Any] = []
        self.halves: list[tuple[Any, str, Any]] = []  # module, name, half parameter: set during an evaluation with the masters
        self.autocast: Any = None

    def cast(self, model: Any, run: RunView | None = None) -> Any:
        """`model`, with its weights cast to half precision except norm layers and buffers."""
        import torch

        half: torch.dtype = getattr(torch, self.dtype)
        for module in model.modules():
            if is_norm(module):
                self.hooks.append(module.register_forward_pre_hook(partial(_cast_inputs, torch.float32)))
                self.hooks.append(module.register_forward_hook(partial(_cast_output, half)))
                continue
            for p in module.parameters(recurse=False):  # not buffers: rotary frequencies and counters need full precision
                if p.dtype == torch.float32:
                    if p.requires_grad:
                        self.masters[p] = torch.nn.Parameter(p.data)
                    p.data = p.data.to(half)
        self.hooks.append(model.register_load_state_dict_pre_hook(self._load_masters))
        return model

    def _load_masters(self, model: Any, state_dict: Any, prefix: str, *_: Any) -> None:
        # checkpoints hold the fp32 masters: load them into the masters too, not only into the rounded half weights
        for name, p in model.named_parameters(remove_duplicate=False):
            if p in self.masters and prefix + name in state_dict:
                self.masters[p].data.copy_(state_dict[prefix + name])

    def swap_in(self, optimizer: Any, run: RunView | None = None) -> Any:
        """`optimizer`, with the half-precision parameters replaced by their masters."""
        for p, master in self.masters.items():
            master.data = master.data.to(p.device)  # the model was moved after `cast`
        for group in optimizer.param_groups:
            group["params"] = [self.masters.get(p, p) for p in group["params"]]
        return optimizer

    def collect(self) -> None:
        """Move the half-precision gradients to the masters as fp32, and free the half-precision ones."""
        import torch

        halves = [p for p in self.masters if p.grad is not None]
        if not halves:
            return
        gradients = [torch.empty_like(self.masters[p]) for p in halves]
        torch._foreach_copy_(gradients, [p.grad for p in halves])
        for p, gradient in zip(halves, gradients, strict=True):
            self.masters[p].grad, p.grad = gradient, None

    def publish(self) -> None:
        """Round the masters into the half-precision weights of the model."""
        import torch

        torch._foreach_copy_([p.data for p in self.masters], [master.data for master in self.masters.values()])

    def export(self, state_dict: dict[str, Any], run: RunView) -> dict[str, Any]:
        """`state_dict` of the model, with the half-precision weights replaced by the masters."""
        named = run.inner_model.named_parameters(remove_duplicate=False)
        found = {name: self.masters[p].detach() for name, p in named if p in self.masters and name in state_dict}
        return {**state_dict, **found}

    def use_masters(self, run: RunView) -> None:
        """Compute with the masters under autocast until `use_half_weights`, for an evaluation with `full_eval = false`."""
        import torch

        # replace the Parameter objects, not their data: another dtype would remove DDP's hooks from the half parameters
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

    def use_half_weights(self, run: RunView) -> None:
        """Undo `use_masters`."""
        self.autocast.__exit__(None, None, None)
        for module, name, p in self.halves:
            setattr(module, name, p)
        self.halves = []

    def restore(self, model: Any, run: RunView | None = None) -> Any:
        """`model` in fp32, with the masters as its weights and without hooks."""
        for hook in self.hooks:
            hook.remove()
        for p in model.parameters():
            if p.is_floating_point():  # quantized weights are packed bytes
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
    after = ("adapter", "quantize")  # adapter weights are cast too, and get masters
    preserves = "rounding"
    conflicts = (
        Conflict(
            lacks="whole_gradients",
            why="O2 moves gradients to its own fp32 masters before the update, and the engine keeps masters itself; "
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
            default="auto", description='"auto": bf16 if the hardware supports it, else fp16, else fp32.'
        )
        level: Literal["O1", "O2"] = Field(
            default="O1", description="O1: autocast with fp32 weights. O2: half-precision weights with fp32 masters."
        )
        full_eval: bool = Field(
            default=False,
            description="O2: evaluate with the half-precision weights; false: with the fp32 masters under autocast.",
        )

        @model_validator(mode="after")
        def require_o2_for_full_eval(self) -> Precision.Options:
            if self.full_eval and self.level == "O1":
                raise ValueError('full_eval = true needs half-precision weights: set level = "O2", or remove full_eval')
            return self

    options: Options

    def probe(self, context: Context) -> Decision:
        requested, hardware = self.options.dtype, context.hardware
        if requested == "fp32":
            return Decision.apply("full precision")
        if requested != "auto" and hardware.can(requested):
            return Decision.apply(f"{self.options.level}: {hardware.can(requested).reason}")
        dtype, reason = best_dtype(hardware)
        to = self.Options(dtype="fp32") if dtype == "fp32" else self.options.model_copy(update={"dtype": dtype})
        if requested == "auto":
            return Decision.apply(f"{dtype}: {reason}", to)
        return Decision.fallback(to, f"{requested}: {hardware.can(requested).reason}; takes {dtype}")

    def apply(self, recipe: Recipe, context: Context) -> None:
        dtype = self.options.dtype
        assert dtype != "auto", "probe() replaces it"
        recipe.model_kwargs.setdefault("dtype", "float32")  # transformers 5 would use the dtype of the file
        half_weights = dtype != "fp32" and self.options.level == "O2"
        recipe.accelerator["mixed_precision"] = "no" if dtype == "fp32" or half_weights else dtype
        if dtype != "fp32" and context.hardware.device_type == "cuda":
            recipe.batch["pad_to_multiple_of"] = 8  # tensor cores need multiples of 8
        if half_weights:
            weights = HalfWeights(dtype)
            recipe.model_steps.append(weights.cast)
            recipe.optimizer_wraps.append(weights.swap_in)
            recipe.masters = weights
            if not self.options.full_eval:
                recipe.events["evaluate_begin"].append(weights.use_masters)
                recipe.events["evaluate_end"].append(weights.use_half_weights)
            recipe.export_steps.append(weights.export)
            recipe.final_steps.append(weights.restore)  # final steps run in reverse: restore fp32 before an adapter is merged
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
        half = MemoryOption(cls.Options(dtype=dtype), 0.6, f"matrix products in {dtype}")
        weights = MemoryOption(cls.Options(dtype=dtype, level="O2"), 0.95, f"weights and activations in {dtype}, fp32 masters")
        level = "fp32" if options is None or options.dtype == "fp32" else options.level
        return {"fp32": [half, weights], "O1": [weights], "O2": []}[level]

    def evidence(self, run: RunView) -> Evidence:
        import torch

        dtype, matmuls = self.options.dtype, run.observation.matmul_dtypes
        weights = count_dtypes(run.inner_model.parameters())
        stepped = count_dtypes(run.engine.parameters)
        scale = run.engine.loss_scale()
        in_dtype = matmuls.get(PROFILER_NAMES[dtype], 0)
        seen = f"{in_dtype} of {sum(matmuls.values())} matmuls in {dtype}; weights {weights}; the optimizer steps on {stepped}"
        if dtype == "fp16":
            seen += "; no loss scale" if scale is None else f"; loss scale {scale.item():g}"
        if not matmuls:
            return Evidence.unknown(f"no matmuls were recorded; {seen}")
        has_half_weights = any(p.dtype in (torch.float16, torch.bfloat16) for p in run.inner_model.parameters())
        expects_half_weights = dtype != "fp32" and (self.options.level == "O2" or run.engine.keeps_masters)
        weights_agree = has_half_weights == expects_half_weights and set(stepped) == {"float32"}
        scaler_agrees = (scale is not None) == (dtype == "fp16")
        return Evidence.active(seen) if in_dtype and weights_agree and scaler_agrees else Evidence.inactive(seen)


def count_dtypes(parameters: Any) -> dict[str, int]:
    """Name of a dtype -> the number of elements of `parameters` with it."""
    counts: dict[str, int] = {}
    for p in parameters:
        name = str(p.dtype).removeprefix("torch.")
        counts[name] = counts.get(name, 0) + p.numel()
    return counts
