"""Compare the loss of a few rows with the losses of single ones. A probe may take the permission to split away, never give it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hwopt.hosts.additivity import Law
from hwopt.hosts.collated import PADDING, Batch, first_rows, is_padded, labels_in, lengths_of, sliced

PROBED_ROWS = 8  # rows of the first batch whose losses are compared


def probed_rows(batch: Batch, pad_id: int | None, pairs: bool = False) -> Batch:
    """The first rows, or pairs, of `batch`, every second one without its last third.

    Rows of one length would hide what trimmed columns change.
    """
    few = first_rows(batch, PROBED_ROWS, pairs)
    ids = few.get("input_ids")
    if pad_id is None or not isinstance(ids, Tensor) or ids.ndim != 2 or ids.shape[1] < 3 or not is_padded(few):
        return few
    found = dict(few)
    for key, filler in (PADDING | {"input_ids": pad_id}).items():
        if key in few and few[key].shape == ids.shape:
            found[key] = few[key].clone()
            found[key][1::2, -(ids.shape[1] // 3) :] = filler
    return found if bool(found["attention_mask"].any(1).all()) else few  # rows that are padded on the left


def adds_up(whole: float, losses: Sequence[float], weights: Sequence[float], rough: bool = False) -> bool:
    """Whether the weighted `losses` of single rows are the loss of the `whole`, up to rounding; `rough`: of half precision.

    A difference counts against the spread of the rows' losses: rows of an untrained model have almost the same loss.
    """
    parts = sum(loss * weight for loss, weight in zip(losses, weights, strict=True))
    spread = max(losses) - min(losses)
    return abs(parts - whole) <= (0.1 * spread + 1e-2 * abs(whole) if rough else 1e-4 * spread + 4e-6 * abs(whole)) + 1e-7


def laws_that_agree(
    loss_of: Callable[[dict[str, Any]], float], few: Batch, laws: Sequence[tuple[Law, bool]], rough: bool
) -> list[tuple[Law, bool]]:
    """Those of `laws` (law, whether the first column of a row predicts nothing) that hold for the rows of `few`, best first.

    All of them if `loss_of` draws random numbers, so that its results cannot be compared, or needs more memory than there is.
    """
    rows = [sliced(few, [row], length) for row, length in enumerate(lengths_of(few))]
    try:
        whole, again, *losses = [loss_of(each) for each in (dict(few), dict(few), *rows)]
    except torch.OutOfMemoryError:  # the step will handle it
        return list(laws)
    if abs(whole - again) > 1e-6 * abs(whole):
        return list(laws)
    found = []
    for law, shifted in laws:
        counts = [labels_in(row, shifted) if law == "labels" else 1 for row in rows]
        counted = [(loss, count) for loss, count in zip(losses, counts, strict=True) if count]
        total = 1 if law == "sum" else max(1, sum(counts))
        if counted and adds_up(whole, [loss for loss, _ in counted], [count / total for _, count in counted], rough):
            off = abs(sum(loss * count for loss, count in counted) / total - whole)
            found.append((off, law, shifted))
    return [(law, shifted) for _, law, shifted in sorted(found, key=lambda each: each[0])]


@contextmanager
def disturbed(model: torch.nn.Module) -> Iterator[None]:
    """`model` with random numbers added to what trains and is a vector, or all zero, as a new head or a new adapter may be.

    With zeros all rows have one loss; a model that is its own teacher or reference has no KL term. Then each law seems to hold.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    kept = {each: each.detach().clone() for each in trained if each.ndim == 1 or not each.any()}
    try:
        for number, parameter in enumerate(kept):
            generator = torch.Generator(parameter.device).manual_seed(number)
            with torch.no_grad():
                noise = torch.empty_like(parameter).normal_(std=0.2 if parameter.ndim == 1 else 0.02, generator=generator)
                parameter.add_(noise)
        yield
    finally:
        with torch.no_grad():
            for parameter, before in kept.items():
                parameter.copy_(before)


def pad_id_of(*sources: Any) -> int | None:
    """The first `pad_token_id` of tokenizers and configs; None if they have none."""
    return next((number for each in sources if (number := getattr(each, "pad_token_id", None)) is not None), None)


def is_rough(precision: str = "no") -> bool:
    """Whether products are rounded to fewer bits than fp32 has."""
    return precision != "no" or torch.backends.cuda.matmul.fp32_precision == "tf32"
