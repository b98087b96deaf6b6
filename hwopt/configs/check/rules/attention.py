"""Attention, packing, checkpointing, adapters and compilation: combinations that do something else than they seem to."""

from __future__ import annotations

from collections.abc import Iterator

from hwopt.configs.check.contract import TRAINERS, Facts, Finding, rule
from hwopt.configs.check.rules.precision import missing
from hwopt.configs.view import View

FLASH = ("flash_attention_2", "flash_attention_3")
HALF, FP32 = ("fp16", "bf16", "mixed_precision", "pure_bf16"), ("float32", "fp32", "float")
REENTRANT = "gradient_checkpointing_kwargs.use_reentrant"


@rule(
    "flash-card", "error", words=("attn_implementation",), needs=("card",), source="flash-attn: Ampere or newer", tools=TRAINERS
)
def flash_card(view: View, facts: Facts) -> Iterator[Finding]:
    """Flash attention on a card without it, such as T4 and V100."""
    name = view.value("attn_implementation")
    if name in FLASH and (reason := missing("flash_attention", facts)):
        fix = view.line("attn_implementation", "sdpa")
        yield Finding("attn_implementation", f"{name} {reason}.", "The first step stops.", fix)


@rule(
    "flash-fp32",
    "error",
    words=("attn_implementation",),
    source="transformers: Flash Attention supports fp16 and bf16 alone",
    tools=TRAINERS,
)
def flash_fp32(view: View, facts: Facts) -> Iterator[Finding]:
    """Flash attention on weights in fp32 without mixed precision."""
    given = [word for word in HALF if view.value(word) not in (False, "no") and not view.lacks(word)]
    weights = str(view.value("torch_dtype")).removeprefix("torch.")
    unsaid = view.tool == "transformers" and view.lacks("torch_dtype")
    if view.value("attn_implementation") in FLASH and not given and (weights in FP32 or unsaid):
        kind = "fp32" if weights in FP32 else "no given type"
        yield Finding(
            "attn_implementation",
            f"{view.value('attn_implementation')} with weights in {kind}, and neither fp16 nor bf16.",
            "Flash attention takes tensors in half precision only: with weights in fp32 the first step stops.",
            view.line("bf16", True),
            None if weights in FP32 else "warning",
        )


@rule("packing-leak", "warning", words=("packing",), source="transformers#46634, axolotl#3796", tools=TRAINERS)
def packing_leak(view: View, facts: Facts) -> Iterator[Finding]:
    """Packing without a kernel that keeps the documents of a row apart."""
    name = view.value("attn_implementation")
    if view.is_on("packing") and name not in FLASH and name != "flex_attention":
        shown = f"with {view.spelled('attn_implementation')} = {name}" if name else "without flash attention"
        yield Finding(
            "packing",
            f"{view.spelled('packing')} is on {shown}.",
            "Documents of one row can attend to each other: the loss is that of another text.",
            view.line("attn_implementation", "flash_attention_2"),
        )


@rule("reentrant-adapter", "warning", words=(REENTRANT,), source="transformers#21381", tools=TRAINERS)
def reentrant_adapter(view: View, facts: Facts) -> Iterator[Finding]:
    """Reentrant checkpointing with frozen weights, through which no gradient flows."""
    if view.is_on(REENTRANT) and view.is_on("use_peft") and view.is_on("gradient_checkpointing"):
        yield Finding(
            REENTRANT,
            "Checkpointing is reentrant, and the adapter freezes the weights below it.",
            "Without enable_input_require_grads() the layers get no gradient: the adapter does not train, with a warning only.",
            view.line(REENTRANT, False),
        )


@rule(
    "cache-checkpointing",
    "warning",
    words=("use_cache",),
    source="transformers: use_cache is incompatible with gradient checkpointing",
    tools=TRAINERS,
)
def cache_checkpointing(view: View, facts: Facts) -> Iterator[Finding]:
    """A cache of keys and values beside activation checkpointing."""
    if view.is_on("use_cache") and view.is_on("gradient_checkpointing"):
        yield Finding(
            "use_cache",
            f"{view.spelled('use_cache')} is true with activation checkpointing.",
            "Most models turn the cache off with a message; others keep it, which costs memory. Training needs none.",
            view.line("use_cache", False),
        )


@rule(
    "unused-checkpointing",
    "error",
    words=("ddp_find_unused_parameters",),
    source="transformers#4659; torch, DistributedDataParallel and reentrant checkpointing",
    tools=TRAINERS,
)
def unused_checkpointing(view: View, facts: Facts) -> Iterator[Finding]:
    """A search for unused parameters beside reentrant checkpointing."""
    word = "ddp_find_unused_parameters"
    reentrant = view.value(REENTRANT, not view.lacks(REENTRANT) or None)
    if view.is_on(word) and view.is_on("gradient_checkpointing") and reentrant is not False:
        unsaid = " (the default of transformers 4)" if REENTRANT not in view else ""
        yield Finding(
            word,
            f"{view.spelled(word)} is true with reentrant checkpointing{unsaid}.",
            'On several ranks the first backward pass stops: "Expected to mark a variable ready only once".',
            f"{view.line(word, False)}, or {view.line(REENTRANT, False)}",
            "warning" if unsaid else None,
        )


@rule("dora-dropout", "information", words=("use_dora",), source="PEFT, DoRA: a faster path without dropout")
def dora_dropout(view: View, facts: Facts) -> Iterator[Finding]:
    """DoRA with dropout, which computes each frozen layer twice."""
    dropout = view.number("lora_dropout")
    if view.is_on("use_dora") and dropout:
        yield Finding(
            "lora_dropout",
            f"DoRA with {view.spelled('lora_dropout')} = {dropout:g}.",
            "PEFT has a faster path without dropout (+29 % samples per second); DoRA takes 1.2 to 2 times as long as LoRA.",
            view.line("lora_dropout", 0),
        )


@rule("compile-widths", "warning", words=("torch_compile",), source="pytorch#188150; recompile limit of 8", tools=TRAINERS)
def compile_widths(view: View, facts: Facts) -> Iterator[Finding]:
    """torch.compile with batches of varying width."""
    if not view.is_on("torch_compile") or view.is_on("packing"):
        return
    graphs = view.value("torch_compile_mode") == "reduce-overhead"
    why = (
        "CUDA graphs are recorded again for each width."
        if graphs
        else "At the recompile limit of 8 torch runs in eager mode, without a message."
    )
    yield Finding(
        "torch_compile_mode" if graphs else "torch_compile",
        f"torch.compile{' with reduce-overhead' if graphs else ''} compiles again for each new width of a batch.",
        why,
        "pad to a few fixed widths, as a hwopt profile does"
        + (f"; {view.line('torch_compile_mode', 'default')}" if graphs else ""),
    )


@rule("length-groups", "information", words=("group_by_length",), source="transformers#20810", tools=TRAINERS)
def length_groups(view: View, facts: Facts) -> Iterator[Finding]:
    """Batches grouped by length, which make waves in the loss."""
    if view.is_on("group_by_length"):
        yield Finding(
            "group_by_length",
            "Samples of similar length share a batch.",
            "The order of the samples changes, and the loss moves in waves. hwopt's length batching keeps the order.",
        )
