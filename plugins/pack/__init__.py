"""Packing: puts several documents into one row, so that almost no padding is computed.

The documents of a step fill rows of similar length. The positions of each document start at 0, and it attends only to itself:
decoders in transformers derive this mask from the position ids, encoders get the mask as input. Classifiers read the first token
of each document. With the flash-attn package a row needs no mask (`kernel`).
A model that does not keep documents apart is skipped (hwopt/model/packing.py tries it in float32). Before step 1 the outputs of
packed documents are compared with those of separate rows, in the run's precision: this finds what the run does to the model.
No key-value cache is used: packing leaks with one (transformers#46634).

Source: Krell et al. 2021 (arXiv:2107.02027); DataCollatorWithFlattening of transformers.
Hardware: any.
Cost: without the flash kernel, a mask of width x width per row.
Numerical effect: rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

from pydantic import Field

from hwopt import plugin as hw
from hwopt.errors import PluginError

TOLERANCE, HALF_TOLERANCE = 1e-4, 0.03
"""Largest norm of the difference between packed and separate outputs / the norm of the outputs.

Measured with attention across documents: 0.14 to 1.1. A maximum would also count single tokens that
rounding sends to another expert.
"""
POSITIONS_AFTER_PADDING = ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "mpnet")
"""Architectures whose positions start at the id of the padding token plus one."""
SEPARATED = {
    "mask": "several documents per row, separated by a mask",
    "flash": "several documents per row, separated by the flash kernel",
}


def pack_rows(lengths: Sequence[int], width: int) -> list[list[int]]:
    """Rows of document indexes with at most `width` tokens each: few rows of similar length, longest row first.

    Takes documents longest first and adds each to the emptiest row (Graham 1969). If they do not fit, tries one row more.
    """
    import heapq

    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    for number in range(-(-sum(lengths) // width), len(lengths) + 1):
        rows: list[list[int]] = [[] for _ in range(number)]
        heap = [(0, row) for row in range(number)]  # (tokens, row)
        for index in order:
            tokens, row = heap[0]
            if tokens + lengths[index] > width:
                break
            heapq.heapreplace(heap, (tokens + lengths[index], row))
            rows[row].append(index)
        else:
            return sorted(rows, key=lambda row: -sum(lengths[i] for i in row))
    raise ValueError(f"a document is longer than {width} tokens")


def document_indices(position_ids: Any) -> Any:
    """The document index of each token, (rows, width); None in evaluation, which does not pack.

    The function of transformers waits for the device, to check whether a row has several documents; this one does not.
    """
    import torch

    if not torch.is_grad_enabled():
        return None
    return (torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1) != 1).cumsum(-1)


def masks_without_sync() -> Any:
    """Inside the block transformers builds masks of packed rows with `document_indices`."""
    from unittest import mock

    from transformers import masking_utils

    return mock.patch.object(masking_utils, "find_packed_sequence_indices", document_indices)


class DocumentHeads:
    """Hooks that make a sequence classifier return logits per document instead of per row, from each document's first token."""

    def __init__(self) -> None:
        self.starts: Any = None

    def attach(self, model: Any, run: hw.RunView | None = None) -> Any:
        body = model.base_model if not hasattr(model, "peft_config") else model.get_base_model().base_model
        model.register_forward_pre_hook(self.take_starts, with_kwargs=True)
        pooler = getattr(body, "pooler", None)
        if pooler is not None:
            pooler.register_forward_pre_hook(lambda module, inputs: (self.first_tokens(inputs[0]), *inputs[1:]))
        body.register_forward_hook(self.keep_first_tokens)
        return model

    def take_starts(self, module: Any, inputs: Any, named: dict[str, Any]) -> Any:
        """Pre-hook of the model: remove `document_starts` from its inputs and keep it."""
        self.starts = named.pop("document_starts", None)
        return inputs, named

    def first_tokens(self, hidden: Any) -> Any:
        """(rows, width, hidden) -> (documents, 1, hidden)."""
        return hidden if self.starts is None else hidden.flatten(0, 1)[self.starts][:, None]

    def keep_first_tokens(self, module: Any, inputs: Any, outputs: Any) -> Any:
        if self.starts is not None:
            outputs.last_hidden_state = self.first_tokens(outputs.last_hidden_state)
        return outputs


def refuse_leaks(run: hw.RunView) -> None:
    """Raise PluginError if packed documents leak."""
    if why := leak(run):
        raise PluginError(
            f"{type(run.inner_model).__name__} does not support packed documents: {why}. Remove [plugins.pack]. "
            "[plugins.length_batching] saves most of the padding too"
        )


def leak(run: hw.RunView) -> str:
    """Why the outputs of packed documents differ from those of the same documents in separate rows; "" if they do not."""
    import torch

    collate, store = run.train_loader.dataset.collate, run.train_loader.dataset.store
    order = sorted(range(len(store)), key=lambda index: len(store.row(index)["input_ids"]))[:3]
    samples, counts = [store.row(index) for index in order], [int(store.counts[index]) for index in order]

    def outputs(batch: Any) -> Any:
        return run.model(**next(batch.to(run.device).micro_batches())[0].inputs).logits.detach().float()

    training = run.inner_model.training
    run.inner_model.eval()
    try:
        packed = outputs(collate.one_row(samples, counts))
        separate = [outputs(collate.alone(sample, count)) for sample, count in zip(samples, counts, strict=True)]
    except (RuntimeError, IndexError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        run.inner_model.train(training)
    lengths = [len(sample["input_ids"]) for sample in samples]
    if packed.ndim == 3:  # (rows, tokens, vocabulary)
        found = packed[:, : sum(lengths)]
        expected = torch.cat([one[:, :length] for one, length in zip(separate, lengths, strict=True)], 1)
    else:
        found, expected = packed, torch.cat(separate)
    in_fp32 = next(run.inner_model.parameters()).dtype == torch.float32
    full = in_fp32 and run.accelerator.mixed_precision == "no"
    limit = (TOLERANCE if full else HALF_TOLERANCE) * float(expected.norm())
    same = found.shape == expected.shape and float((found - expected).norm()) <= limit
    return "" if same else "outputs of packed documents differ from those in separate rows"


class Pack(hw.Plugin):
    name = "pack"
    stage = hw.Stage.DATA
    effect = "rounding"
    aliases: ClassVar[Mapping[str, str]] = {"packing": "enabled = true", "sample_packing": "enabled = true"}
    relations = hw.Relations(
        conflicts=(
            hw.Conflict(
                field="cut",
                why="recipe.cut needs rows with one sample each, and pack makes rows with several; keep one of the two tables",
            ),
            hw.Conflict(
                field="batch['widths']",
                why="the width of packed rows varies, and batch['widths'] requires fixed widths; keep one of the two tables",
            ),
            hw.Conflict(
                field="model_kwargs['attn_implementation']",
                why='kernel = "flash" sets the attention implementation too; set kernel = "mask"',
                when=lambda pack, sdpa: pack.kernel == "flash",
            ),
        )
    )

    class Options(hw.PluginOptions):
        width: int | None = Field(default=None, gt=0)
        """Maximum tokens per row; default about twice the longest sample of the step."""
        kernel: Literal["auto", "mask", "flash"] = "auto"
        """How documents are separated: "mask" by a mask; "flash" by the flash-attn package."""

    options: Options

    def probe(self, context: hw.Context) -> hw.Decision:
        model = context.model
        if context.task.inputs == "images":
            return hw.Decision.skip("images of one size need no padding")
        if model.packing_problem:
            return hw.Decision.skip(f"{model.architecture} {model.packing_problem}")
        if model.is_decoder and context.task.target == "sample":
            return hw.Decision.skip(
                f"{model.architecture} classifies the last token of a row, and packed rows have several documents"
            )
        if self.options.kernel != "auto":
            return hw.Decision.apply(SEPARATED[self.options.kernel])
        problem = flash_problem(context)
        kernel = "mask" if problem else "flash"
        return hw.Decision.apply(SEPARATED[kernel] + problem, self.options.changed(kernel=kernel))

    def apply(self, recipe: hw.Recipe, context: hw.Context) -> None:
        model, width, flat = context.model, self.options.width, self.options.kernel == "flash"
        after_padding = model.model_type in POSITIONS_AFTER_PADDING
        packed = hw.Lazy("hwopt_plugins.pack.collate:PackedCollate")
        recipe.collate = partial(packed, width=width, flat=flat, decoder=model.is_decoder, after_padding=after_padding)
        recipe.process.append(masks_without_sync)
        if flat:
            recipe.model_kwargs["attn_implementation"] = "flash_attention_2"
        if context.task.target == "sample":
            recipe.model_steps.append(DocumentHeads().attach)
        recipe.prepared_steps.append(refuse_leaks)

    def evidence(self, run: hw.RunView) -> hw.Evidence:
        step = run.last_step_batch
        computed = sum(rows * width for rows, width in step.sizes)
        shared = sum(number > 1 for number in step.samples_per_row)
        seen = (
            f"{step.rows} documents in {len(step.lengths)} rows, {shared} of them with several documents; "
            f"{step.tokens} of {computed} computed tokens are not padding ({step.tokens / computed:.3f}); "
        )
        if run.world_size > 1:  # a forward pass may need all ranks
            seen += "the check before step 1 found no leak"
        elif why := leak(run):
            return hw.Evidence.inactive(seen + why)
        else:
            seen += "packed documents have the outputs of separate rows"
        if len(step.lengths) <= 1 and not shared:
            return hw.Evidence.unknown(f"the step has a single row: {seen}")
        enough = len(pack_rows(step.lengths, max(step.lengths)))
        if enough < len(step.lengths):
            return hw.Evidence.inactive(f"{seen}; {enough} rows of {max(step.lengths):,} tokens are enough")
        return hw.Evidence.of(shared, seen)


def flash_problem(context: hw.Context) -> str:
    """Why the flash kernel cannot be used, as a suffix for a reason; "" if it can."""
    bf16 = context.hardware.can("bf16")
    met = {
        "needs a GPU": context.hardware.device_type == "cuda",
        "needs the package flash-attn": context.has("flash-attn"),
        f"needs compute capability 8.0: {bf16.reason}": bf16,
        f"is not supported by {context.model.architecture}": context.model.supports_flash,
    }
    return next((f"; the flash kernel {need}" for need, is_met in met.items() if not is_met), "")
