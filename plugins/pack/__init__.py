"""Packing: several documents in one row, which do not see each other, so that nothing is computed on padding.

The samples of a step are laid into rows of about equal length; each document has positions of its own from 0, and attends to
itself alone: decoders of transformers make that mask from the position ids, encoders are given it. Classifiers read the first
token of each document. Where flash attention's package is there, a row is computed without any mask (`kernel`).
Source: Krell et al. 2021 (arXiv:2107.02027); transformers' DataCollatorWithFlattening, which leaks with a cache
(transformers#46634), so there is none. Hardware: any. Cost: a mask of width x width a row without the flash kernel.
Numerical effect: rounding. Before step 1 the model is shown two documents in one row and one by one: one that lets them
see each other is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

from pydantic import Field

from hwopt.errors import PluginError
from hwopt.plugin import Conflict, Context, Decision, Evidence, Plugin, PluginOptions, Recipe, RunView, Stage

TOLERANCE, HALF_TOLERANCE = 1e-4, 0.02
"""Of the largest output, between a document in a row of its own and in a shared one."""
BEHIND_PADDING = ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "mpnet")
"""Architectures whose positions begin behind the padding token's number."""


def shared_rows(lengths: Sequence[int], width: int) -> list[list[int]]:
    """Documents (indexes into `lengths`) in as few rows of at most `width` tokens as need be, about equally full.

    The longest first, each into the row that is emptiest (Graham 1969); one row more where that does not fit.
    """
    import heapq

    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    for number in range(-(-sum(lengths) // width), len(lengths) + 1):
        rows: list[list[int]] = [[] for _ in range(number)]
        filled = [(0, row) for row in range(number)]
        for index in order:
            tokens, row = filled[0]
            if tokens + lengths[index] > width:
                break
            heapq.heapreplace(filled, (tokens + lengths[index], row))
            rows[row].append(index)
        else:
            return sorted((row for row in rows if row), key=lambda row: -sum(lengths[i] for i in row))
    raise ValueError(f"a document is longer than {width} tokens")


def positions_without_waiting(position_ids: Any) -> Any:
    """transformers' search for documents in packed rows, (rows, width), without asking the device whether there are any.

    Evaluation packs nothing.
    """
    import torch

    if not torch.is_grad_enabled():
        return None
    return (torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1) != 1).cumsum(-1)


@contextmanager
def documents_told_apart() -> Iterator[None]:
    from transformers import masking_utils

    search = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = positions_without_waiting
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = search


def packed_collate(padded: Any, *, width: int | None, flat: bool, decoder: bool, behind_padding: bool) -> Any:
    from hwopt_plugins.pack.collate import PackedCollate

    return PackedCollate(padded, width, flat, decoder, padded.pad_id + 1 if behind_padding else 0)


class Heads:
    """Lets a classifier of one label a row give one for each document, from the token that each begins with."""

    def __init__(self) -> None:
        self.starts: Any = None

    def attach(self, model: Any, run: RunView | None = None) -> Any:
        body = model.base_model if not hasattr(model, "peft_config") else model.get_base_model().base_model
        model.register_forward_pre_hook(self.take, with_kwargs=True)
        pooler = getattr(body, "pooler", None)
        if pooler is not None:
            pooler.register_forward_pre_hook(lambda module, inputs: (self.first_tokens(inputs[0]), *inputs[1:]))
        body.register_forward_hook(self.truncate)
        return model

    def take(self, module: Any, inputs: Any, named: dict[str, Any]) -> Any:
        self.starts = named.pop("document_starts", None)
        return inputs, named

    def first_tokens(self, hidden: Any) -> Any:
        """(rows, width, hidden) -> (documents, 1, hidden)."""
        return hidden if self.starts is None else hidden.flatten(0, 1)[self.starts][:, None]

    def truncate(self, module: Any, inputs: Any, outputs: Any) -> Any:
        if self.starts is not None:
            outputs.last_hidden_state = self.first_tokens(outputs.last_hidden_state)
        return outputs


def refuse_leaks(run: RunView) -> None:
    """Raise PluginError where a document's outputs in a shared row are not those that it has in a padded row of its own."""
    import torch

    collate, store = run.train_loader.dataset.collate, run.train_loader.dataset.store
    order = sorted(range(len(store)), key=lambda index: len(store.row(index)["input_ids"]))[:3]
    samples, counts = [store.row(index) for index in order], [int(store.counts[index]) for index in order]

    def outputs(batch: Any) -> Any:
        return run.model(**next(batch.to(run.device).micro_batches())[0].inputs).logits.detach().float()

    training = run.inner_model.training
    run.inner_model.eval()
    try:
        together = outputs(collate.one_row(samples, counts))
        alone = [outputs(collate.alone(sample, count)) for sample, count in zip(samples, counts, strict=True)]
    except (RuntimeError, IndexError, TypeError) as error:
        raise PluginError(told_apart_not(run, f"{type(error).__name__}: {error}")) from error
    finally:
        run.inner_model.train(training)
    lengths = [len(sample["input_ids"]) for sample in samples]
    per_token = together.ndim == 3
    expected = (
        torch.cat([one[:, :length] for one, length in zip(alone, lengths, strict=True)], 1) if per_token else torch.cat(alone)
    )
    found = together[:, : sum(lengths)] if per_token else together
    full = (
        run.recipe.accelerator.get("mixed_precision", "no") == "no" and next(run.inner_model.parameters()).dtype == torch.float32
    )
    most = (TOLERANCE if full else HALF_TOLERANCE) * float(expected.abs().max())
    if found.shape != expected.shape or float((found - expected).abs().max()) > most:
        raise PluginError(told_apart_not(run, "their outputs differ from those in rows of their own"))


def told_apart_not(run: RunView, why: str) -> str:
    return (
        f"{type(run.inner_model).__name__} does not tell documents in one row apart ({why}): remove [plugins.pack]; "
        "[plugins.length_batching] saves most of the padding too"
    )


class Pack(Plugin):
    name = "pack"
    stage = Stage.DATA
    preserves = "rounding"
    conflicts = (
        Conflict(field="cut", why="pack fills rows, cut makes micro-batches of rows with one sample each; keep one of them"),
        Conflict(
            field="batch['widths']",
            why="a packed row has another width in each step, and batch['widths'] asks for fixed ones; keep one of them",
        ),
        Conflict(
            field="model_kwargs['attn_implementation']",
            why='kernel = "flash" sets the attention implementation too; set kernel = "mask"',
            when=lambda pack, sdpa: pack.kernel == "flash",
        ),
    )

    class Options(PluginOptions):
        width: int | None = Field(
            default=None, gt=0, description="Tokens of a row at most; about twice the longest sample of the step where left out."
        )
        kernel: Literal["auto", "mask", "flash"] = Field(
            default="auto", description='"mask": documents are masked apart; "flash": the flash-attn package, without a mask.'
        )

    options: Options

    def probe(self, context: Context) -> Decision:
        model = context.model
        if not model.supports_packing:
            why = "takes no position ids" if model.is_decoder else "takes no position ids and mask of its own for each document"
            return Decision.skip(f"{model.architecture} {why}: documents in one row would see each other")
        if model.is_decoder and context.job.task.kind == "text-classification":
            return Decision.skip(f"{model.architecture} reads its label from the end of the row, which several documents share")
        if self.options.kernel != "auto":
            return Decision.apply(self.told(self.options.kernel))
        flash = flash_reason(context)
        kernel: Literal["mask", "flash"] = "mask" if flash else "flash"
        return Decision.apply(self.told(kernel) + flash, self.options.model_copy(update={"kernel": kernel}))

    def told(self, kernel: str) -> str:
        return "several documents in a row, " + ("without a mask" if kernel == "flash" else "masked apart")

    def apply(self, recipe: Recipe, context: Context) -> None:
        model = context.model
        flat = self.options.kernel == "flash"
        recipe.collate = partial(
            packed_collate,
            width=self.options.width,
            flat=flat,
            decoder=model.is_decoder,
            behind_padding=model.model_type in BEHIND_PADDING,
        )
        recipe.process.append(documents_told_apart)
        if flat:
            recipe.model_kwargs["attn_implementation"] = "flash_attention_2"
        if not model.is_decoder:
            recipe.model_steps.append(Heads().attach)
        recipe.prepared_steps.append(refuse_leaks)

    def evidence(self, run: RunView) -> Evidence:
        step = run.last_step_batch
        computed = sum(rows * width for rows, width in step.sizes)
        shared = sum(number > 1 for number in step.documents)
        seen = (
            f"{step.rows} documents in {len(step.lengths)} rows, {shared} of them shared; "
            f"{step.tokens} of {computed} computed tokens are real ({step.tokens / computed:.3f}); none saw another before step 1"
        )
        if shared:
            return Evidence.active(seen)
        return Evidence.unknown(f"nothing to share: {seen}") if len(step.lengths) <= 1 else Evidence.inactive(seen)


def flash_reason(context: Context) -> str:
    """Why the flash kernel cannot be taken; "" where it can."""
    if context.hardware.device_type != "cuda":
        return "; the flash kernel needs a GPU"
    if not context.has("flash-attn"):
        return "; the flash kernel needs the package flash-attn"
    if not context.hardware.can("bf16"):
        return f"; the flash kernel needs compute capability 8.0: {context.hardware.can('bf16').reason}"
    if not context.model.supports_flash:
        return f"; {context.model.architecture} does not support the flash kernel"
    return ""
