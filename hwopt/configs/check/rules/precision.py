"""Data types: what contradicts, what the card lacks, and what has no effect."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hwopt.configs.check.contract import TRAINERS, Facts, Finding, Level, rule
from hwopt.configs.view import View
from hwopt.hardware.device import Feature


def on_card(view: View) -> Level:
    """A trainer stops or emulates; a plugin of hwopt falls back and says so."""
    return "warning" if view.is_hwopt else "error"


def missing(feature: Feature, facts: Facts) -> str:
    """Why the card lacks `feature`; "" if it has it. A CPU is not asked."""
    assert facts.hardware is not None  # the rule needs a card
    capability = facts.hardware.can(feature)
    return "" if capability or facts.hardware.device_type == "cpu" else capability.reason


@rule("fp16-and-bf16", "error", words=("fp16", "bf16"), source="transformers, TrainingArguments: at most one of both")
def fp16_and_bf16(view: View, facts: Facts) -> Iterator[Finding]:
    """fp16 and bf16 are both on."""
    if view.is_on("fp16") and view.is_on("bf16"):
        yield Finding(
            "bf16", "fp16 and bf16 are both true.", "The trainer stops: a run has one of the two.", view.line("fp16", False)
        )


@rule("bf16-card", "error", words=("bf16", "mixed_precision", "pure_bf16"), needs=("card",), source="notes.md#t4")
def bf16_card(view: View, facts: Facts) -> Iterator[Finding]:
    """bf16 on a card without it, such as T4 and V100."""
    if not (view.is_on("bf16") or view.is_on("pure_bf16") or view.value("mixed_precision") == "bf16"):
        return
    word = next(word for word in ("bf16", "pure_bf16", "mixed_precision") if word in view)
    if reason := missing("bf16", facts):
        named = word == "mixed_precision" or view.is_hwopt
        fix = view.line("mixed_precision", "fp16") if named else f"{view.line(word, False)} and {view.line('fp16', True)}"
        effect = "hwopt trains with fp16 instead." if view.is_hwopt else "torch emulates bf16 there, which is slow."
        yield Finding(word, f"bf16 {reason}.", effect, fix, on_card(view))


@rule(
    "tf32-card",
    "error",
    words=("tf32",),
    needs=("card",),
    source="notes.md#t4: TF32 on a T4",
)
def tf32_card(view: View, facts: Facts) -> Iterator[Finding]:
    """TF32 on a card without it, such as T4 and V100."""
    if view.is_on("tf32") and (reason := missing("tf32", facts)):
        fix = f"remove [{view.spelled('tf32')}]" if view.is_hwopt else f"remove {view.spelled('tf32')}"
        effect = "hwopt skips it." if view.is_hwopt else "transformers stops; other tools train on without it."
        yield Finding("tf32", f"tf32 {reason}.", effect, fix, on_card(view))


@rule("fp16-card", "warning", words=("fp16", "mixed_precision"), needs=("card",), source="NVIDIA Volta white paper")
def fp16_card(view: View, facts: Facts) -> Iterator[Finding]:
    """fp16 on a card without tensor cores for it."""
    on = view.is_on("fp16") or view.value("mixed_precision") == "fp16"
    if on and (reason := missing("fp16", facts)):
        word = "fp16" if "fp16" in view else "mixed_precision"
        yield Finding(
            word, f"fp16 {reason}.", "The step gets no faster, and gradients can underflow.", f"remove {view.spelled(word)}"
        )


@rule("tf32-beside-half", "information", words=("tf32",), source="TF32 concerns products of fp32 tensors only")
def tf32_beside_half(view: View, facts: Facts) -> Iterator[Finding]:
    """TF32 beside fp16 or bf16, where few products are left in fp32."""
    half = next((word for word in ("bf16", "fp16") if view.is_on(word)), None)
    if view.is_on("tf32") and half:
        yield Finding(
            "tf32",
            f"tf32 and {half} are both on.",
            f"TF32 speeds up products of fp32 tensors; with {half} few are left. It does no harm.",
        )


@rule(
    "apex-level",
    "warning",
    words=("fp16_opt_level",),
    source="transformers, fp16_opt_level; notes.md#rtx-3070-64-rows",
    tools=("transformers", "llama-factory"),
)
def apex_level(view: View, facts: Facts) -> Iterator[Finding]:
    """fp16_opt_level, which has an effect with NVIDIA Apex only."""
    level = view.value("fp16_opt_level")
    yield Finding(
        "fp16_opt_level",
        f"fp16_opt_level is {level}; it belongs to NVIDIA Apex.",
        "With torch's native AMP transformers ignores it: weights stay in fp32 under autocast (O1). Version 5 has no such name.",
        f'remove {view.spelled("fp16_opt_level")}; a hwopt profile has level = "O2" for half-precision weights',
        "information" if level == "O1" else None,
    )


@rule(
    "fp16-weights",
    "error",
    words=("torch_dtype",),
    source="torch, GradScaler: Attempting to unscale FP16 gradients",
    tools=TRAINERS,
)
def fp16_weights(view: View, facts: Facts) -> Iterator[Finding]:
    """The weights are loaded in fp16 and trained with fp16 loss scaling."""
    half = str(view.value("torch_dtype")).removeprefix("torch.") in ("float16", "fp16", "half")
    if half and view.is_on("fp16") and not view.is_on("use_peft"):
        yield Finding(
            "torch_dtype",
            f"{view.spelled('torch_dtype')} is {view.value('torch_dtype')} beside fp16 = true.",
            'The first update stops with "Attempting to unscale FP16 gradients": loss scaling needs fp32 weights.',
            view.line("torch_dtype", "float32"),
        )


BF16_MODELS = re.compile(r"gemma(?!-?4)|t5[\w.-]*-(large|xl|xxl|3b|11b)", re.IGNORECASE)
"""Models trained in bf16 whose activations exceed the range of fp16."""


@rule(
    "fp16-model",
    "warning",
    words=("model_name_or_path",),
    source="transformers#36822 and gemma_pytorch#24 (Gemma), transformers#9295 (T5)",
)
def fp16_model(view: View, facts: Facts) -> Iterator[Finding]:
    """fp16 for a model trained in bf16, whose activations exceed fp16's range: Gemma, T5."""
    name = str(view.value("model_name_or_path"))
    on = view.is_on("fp16") or view.value("mixed_precision") == "fp16"
    if on and BF16_MODELS.search(name):
        word = "fp16" if "fp16" in view else "mixed_precision"
        fix = (
            view.line("mixed_precision", "bf16")
            if word != "fp16"
            else f"{view.line('fp16', False)} and {view.line('bf16', True)}"
        )
        yield Finding(
            word,
            f"{name.rsplit('/', 1)[-1]} with fp16.",
            "The model was trained in bf16. Its activations can exceed 65,504, the largest number of fp16: the loss becomes NaN.",
            f"{fix}; without bf16 on the card train in fp32",
        )
