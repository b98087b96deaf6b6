"""Half precision: autocast with fp32 weights (O1), half-precision weights with fp32 masters (O2), or bf16 weights alone (pure).

O1 computes matrix products in fp16 or bf16 and the rest in fp32, with Accelerate's autocast. Frozen weights, such as those under
an adapter, are stored in half precision; whatever trains is fp32.
O2 stores weights, activations and gradients in half precision, and the optimizer updates fp32 masters. Norm layers keep fp32.
pure stores weights, activations, gradients and optimizer states in bf16 and has no masters. Checkpoints and final/ hold bf16.
fp16 uses a loss scaler. The names O1 and O2 come from Apex; Apex itself is not used.

Source: fp16, Micikevicius et al. 2018 (arXiv:1710.03740); bf16, Kalamkar et al. 2019 (arXiv:1905.12322).
Hardware: fp16 needs compute capability 7.0; bf16 needs 8.0, or a CPU with AMX or AVX512-BF16.
Cost: none. O2 saves activation memory and bandwidth, but no state: O1 and O2 need 16 bytes per trained parameter with AdamW,
pure 8, and all of them 2 bytes per frozen one.
Numerical effect: products keep 11 (fp16) or 8 (bf16) bits; O2 and pure also accumulate micro-batch gradients in half precision.
pure rounds each update to bf16: an update under 1/512 to 1/256 of its weight is lost, unless the optimizer rounds stochastically.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal

from pydantic import model_validator

from hwopt import plugin as hw

APEX_LEVELS = {"O0": {"dtype": "fp32"}, "O1": {"level": "O1"}, "O2": {"level": "O2"}}
"""`fp16_opt_level` -> options."""


def dtype_from(value: Any) -> Mapping[str, Any] | None:
    """The options for a `torch_dtype` or a `mixed_precision` of another tool; {} if it means weights and products in fp32."""
    if value in (None, False, "no"):
        return {}
    name = hw.dtype_name(value)
    return {"dtype": name} if name in ("fp16", "bf16", "fp32", "auto") else None


def flag_from(dtype: str, value: Any) -> Mapping[str, Any]:
    """The options for `fp16 = value` or `bf16 = value` of another tool."""
    return {"dtype": "auto" if value == "auto" else dtype} if value else {}


WORTH_IT = 0.75
"""The time of a layer in bf16, relative to fp32, below which a step is faster: the rest of a step gains nothing. Where a layer
took .57, steps of MiniLM and of a small decoder took .74 to .87; where it took .79, those of the demo took 1.08."""


class Precision(hw.Plugin):
    name = "precision"
    stage = hw.Stage.MODEL
    relations = hw.Relations(
        after=("adapter", "quantize"),  # adapter weights are cast too, and get masters
        conflicts=(
            hw.Conflict(
                lacks="whole_gradients",
                why="O2 moves the whole gradient to its own fp32 masters, and the engine has no whole "
                'gradient before the update; set level = "O1"',
                when=lambda precision, engine: precision.level == "O2" and precision.dtype != "fp32",
            ),
            hw.Conflict(
                lacks="whole_parameters",
                why='pure has no fp32 masters, and the engine keeps masters of its partitions or shards; set level = "O1"',
                when=lambda precision, engine: precision.level == "pure" and precision.dtype != "fp32",
            ),
        ),
    )
    aliases: ClassVar[Mapping[str, str | hw.Alias]] = {
        "fp16": hw.Alias("dtype = 'fp16'", partial(flag_from, "fp16")),
        "bf16": hw.Alias("dtype = 'bf16'", partial(flag_from, "bf16")),
        "mixed_precision": hw.Alias("dtype", dtype_from),
        "torch_dtype": hw.Alias("dtype", dtype_from),
        "fp16_opt_level": hw.Alias("level", APEX_LEVELS.get),
        "pure_bf16": hw.Alias("level = 'pure'", lambda value: {"dtype": "bf16", "level": "pure"} if value else {}),
        "fp16_full_eval": "full_eval = true",
        "bf16_full_eval": "full_eval = true",
    }

    class Options(hw.PluginOptions):
        dtype: Literal["auto", "fp16", "bf16", "fp32"] = "auto"
        """Dtype of matrix products; "auto": bf16 if the hardware supports it, else fp16, else fp32."""
        level: Literal["O1", "O2", "pure"] = "O1"
        """O1: autocast with fp32 weights. O2: half-precision weights with fp32 masters. pure: bf16 weights, gradients and
        states without masters."""
        full_eval: bool = False
        """O2: evaluate with the half-precision weights; false: with the fp32 masters under autocast."""

        @model_validator(mode="after")
        def require_o2_for_full_eval(self) -> Precision.Options:
            if self.full_eval and self.level == "O1":
                raise ValueError('full_eval = true needs half-precision weights: set level = "O2", or remove full_eval')
            return self

        @model_validator(mode="after")
        def require_bf16_for_pure(self) -> Precision.Options:
            if self.level == "pure" and self.dtype == "fp16":
                raise ValueError(
                    'level = "pure" needs dtype = "bf16": without fp32 masters, fp16 gradients cannot be unscaled and small '
                    'fp16 states become 0. For fp16 set level = "O2"'
                )
            return self

    options: Options

    @property
    def effect(self) -> hw.Effect:
        return "method" if self.options.level == "pure" and self.options.dtype != "fp32" else "rounding"

    def probe(self, context: hw.Context) -> hw.Decision:
        decision = self.by_hardware(context)
        options: Any = (*decision.options, self.options)[0]
        if options.dtype != "fp16" or not context.model.exceeds_fp16:
            return decision
        bf16 = 'dtype = "bf16"' if context.hardware.can("bf16") else "a card with bf16"
        why = f"{context.model.model_type} was trained in bf16, and its activations can exceed 65,504, the largest fp16 number: "
        why += f'the loss can become NaN. Use {bf16}, or dtype = "fp32"'
        return hw.Decision.fallback(options, f"{decision.reason}; {why}")

    def by_hardware(self, context: hw.Context) -> hw.Decision:
        """The decision for any model."""
        options, hardware = self.options, context.hardware
        requested = options.dtype
        if options.level == "O2" and (why := context.lacking.get("masters")):
            o1 = options.changed(level="O1")
            return hw.Decision.fallback((*type(self)(o1).by_hardware(context).options, o1)[0], f"O1: {why}")
        if requested == "fp32":
            return hw.Decision.apply("full precision")
        if requested != "auto" and hardware.can(requested):
            return hw.Decision.apply(f"{options.level}: {hardware.can(requested).reason}")
        dtype, reason = hardware.best_dtype()
        ratio = None if hardware.layer is None else hardware.layer.bf16_ratio
        if requested == "auto" and dtype == "bf16" and ratio is not None:
            reason += f", and takes {ratio:.2f} times as long as fp32 for a layer of this size, measured here"
            dtype = "bf16" if ratio < WORTH_IT else "fp32"
        elif requested == "auto" and dtype == "bf16" and hardware.device_type == "cpu" and not context.model.hidden_size:
            dtype, reason = "fp32", f"{reason}, and the size of the model's layers is not known: bf16 may be slower"
        if options.level == "pure" and dtype == "fp16":
            to = options.changed(dtype=dtype, level="O2")
            return hw.Decision.fallback(to, f"pure needs bf16: {hardware.can('bf16').reason}; takes fp16 with fp32 masters (O2)")
        unused = {"level": "O1", "full_eval": False} if dtype == "fp32" else {}
        to = options.changed(dtype=dtype, **unused)
        if requested == "auto":
            return hw.Decision.apply(f"{dtype}: {reason}", to)
        return hw.Decision.fallback(to, f"{requested}: {hardware.can(requested).reason}; takes {dtype}")

    def apply(self, recipe: hw.Recipe, context: hw.Context) -> None:
        from hwopt_plugins.precision.half_weights import HalfWeights, cast_frozen, cast_without_masters, to_fp32

        dtype = self.options.dtype
        assert dtype != "auto", "probe() replaces it"
        level = "O1" if dtype == "fp32" else self.options.level
        # transformers 5 would use the dtype of the file; loading in fp32 would need twice the host memory of bf16
        recipe.model_kwargs.setdefault("dtype", "bfloat16" if level == "pure" else "float32")
        recipe.accelerator["mixed_precision"] = dtype if level == "O1" and dtype != "fp32" else "no"
        if dtype != "fp32" and context.hardware.device_type == "cuda":
            recipe.batch["pad_to_multiple_of"] = 8  # tensor cores need multiples of 8
        if level == "O1" and dtype != "fp32" and not context.lacking:  # a model of the user's own keeps its dtypes
            recipe.model_steps.append(partial(cast_frozen, dtype))
            recipe.final_steps.append(to_fp32)
        if level == "pure":
            recipe.model_steps.append(cast_without_masters)
        if level == "O2":
            weights = HalfWeights(dtype)
            recipe.model_steps.append(weights.cast)
            recipe.optimizer_wraps.append(weights.swap_in)
            recipe.masters = weights
            if not self.options.full_eval:
                recipe.events.append(weights)
            recipe.export_steps.append(weights.export)
            recipe.final_steps.append(weights.restore)  # final steps run in reverse: restore fp32 before an adapter is merged
            if dtype == "fp16":
                recipe.scaler = partial(hw.Lazy("torch.amp:GradScaler"), context.hardware.device_type)

    def memory(self, spec: hw.MemorySpec, context: hw.Context) -> None:
        if self.options.dtype == "fp32":
            return
        spec.frozen_bytes = 2.0
        if self.options.level != "O1":
            spec.weight_bytes, spec.gradient_bytes = 2.0, 2.0
            spec.master_bytes = 4.0 if self.options.level == "O2" else 0.0

    @classmethod
    def alternatives(cls, options: Any | None, context: hw.Context) -> list[hw.Scale]:
        """O2, O1 and the present precision, if it is another one. fp32 is not offered."""
        dtype, _ = context.hardware.best_dtype()
        if dtype == "fp32":
            return []
        present = "fp32" if options is None or options.dtype == "fp32" else options.level
        full = {"dtype": dtype} if present == "fp32" else {}
        o2 = hw.Choice(changes={**full, "level": "O2"}, note=f"weights and activations in {dtype}, fp32 masters", time=0.57)
        o1 = hw.Choice(changes={**full, "level": "O1"}, note=f"matrix products in {dtype}, fp32 weights", time=0.6)
        if present == "pure":
            pure = hw.Choice(changes={"level": "pure"}, note="no fp32 masters", time=0.57)
            return [hw.Scale(choices=(pure, replace(o1, alters=True)), present=0)]
        if present == "fp32":
            return [hw.Scale(choices=(o2, o1, hw.Choice(changes={"dtype": "fp32"})), present=2)]
        return [hw.Scale(choices=(o2, o1), present=("O2", "O1").index(present))]

    def evidence(self, run: hw.RunView) -> hw.Evidence:
        from hwopt_plugins.precision.dtypes_in_use import dtypes_in_use

        found: hw.Evidence = dtypes_in_use(run)
        return found

    def expects(self) -> Mapping[str, Any]:
        dtype, level = self.options.dtype, self.options.level
        half = dtype != "fp32"
        return {
            f"{dtype}_matmuls": True,
            "linear_layers": dtype,
            "frozen_in_fp32": 0,
            "half_weights": half and level != "O1",
            "updated": "bfloat16" if half and level == "pure" else "float32",
            "loss_scale": dtype == "fp16",
        }
