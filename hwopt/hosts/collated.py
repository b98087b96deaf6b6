"""Micro-batches of a step from the batches that the user's own collator made: rows are sliced, padding columns trimmed.

The collator runs once for each batch, as in the user's script: random masks, augmentations and counts of labels are the same
however the step is split, and in a repeated step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor

from hwopt.data.batches.step_batch import Widths
from hwopt.hosts.additivity import Law

Batch = Mapping[str, Any]
Cut = Callable[[Sequence[int], int], Iterable[Sequence[int]]]
"""(lengths, most rows) -> the rows of each micro-batch, as `recipe.cut`."""
MASKS = ("attention_mask", "token_type_ids", "decoder_attention_mask", "completion_mask", "assistant_masks")
PADDING = dict.fromkeys(MASKS, 0) | {"labels": -100}
"""Key of a batch -> the value that pads it on the right. With `input_ids`, these are cut to the tokens of a micro-batch."""
AS_LONG = Widths()  # micro-batches are as wide as their longest row
HALVES = ("input_ids", "attention_mask", "completion_mask")
"""Keys of a batch of pairs that hold the chosen rows, then the rejected ones; others have an entry for each pair."""
MEDIA = ("pixel_values", "image", "video", "audio", "input_features")
"""Starts of the keys that hold what the texts of a batch refer to. A row may refer to any number of them, also none."""


@dataclass(frozen=True)
class CollatedPart:
    inputs: dict[str, Any]
    weight: float  # what its loss is multiplied by, so that the losses of a step add up to those of its batches
    lengths: tuple[int, ...]  # columns that each row needs; of a pair those of its longer text
    ignored: int = 0  # rows of its batch in no part, because none of their labels counts
    first: bool = True  # whether its rows may be longer than those of the part before: it begins a cut, or is a half

    @property
    def size(self) -> tuple[int, int]:
        """(rows, width)."""
        return len(self.lengths), width_of(self.inputs)


def width_of(batch: Batch) -> int:
    return ids.shape[-1] if isinstance(ids := batch.get("input_ids"), Tensor) and ids.ndim > 1 else 1


def rows_of(batch: Any) -> int | None:
    """The rows of `batch` if every value has one entry for each row; None if it cannot be sliced."""
    if not isinstance(batch, Mapping) or ("input_ids" in batch and any(key.startswith(MEDIA) for key in batch)):
        return None
    counts = {value.shape[0] if isinstance(value, Tensor) and value.ndim else -1 for value in batch.values()}
    return counts.pop() if len(counts) == 1 and -1 not in counts else None


def unsliceable(batch: Any) -> str:
    """The first value of `batch` that cannot be sliced by rows."""
    named = batch.items() if isinstance(batch, Mapping) else ()
    names = (name for name, value in named if not isinstance(value, Tensor) or not value.ndim or name.startswith(MEDIA))
    return next(map(repr, names), "a value")


def lengths_of(batch: Batch) -> list[int]:
    """The columns that each row needs: up to its last token, which the attention mask names."""
    if not is_padded(batch):
        return [width_of(batch)] * (rows_of(batch) or 0)
    mask, labels = batch["attention_mask"], batch.get("labels")
    used = mask.ne(0)
    if isinstance(labels, Tensor) and labels.shape == mask.shape:
        used = used | labels.ne(-100)
    columns = torch.arange(1, width_of(batch) + 1, device=mask.device)
    lengths: list[int] = (used * columns).flatten(1).amax(1).clamp(min=1).tolist()
    return lengths


def is_padded(batch: Batch) -> bool:
    """Whether columns on the right can be taken from `batch` and added to it: the mask says which are padding."""
    mask, ids = batch.get("attention_mask"), batch.get("input_ids")
    if not (isinstance(mask, Tensor) and isinstance(ids, Tensor)):  # audio has a mask of its samples, and no tokens
        return False
    return mask.shape == ids.shape and mask.ndim > 1 and known_columns(batch)


def why_not_padded(batch: Batch, pad_id: int | None) -> str:
    """Why batches such as `batch` cannot be padded to a few fixed widths; "" if they can."""
    if pad_id is None:
        return "no pad token is known"
    if "input_ids" not in batch or not is_padded(batch):
        return "not all values are known to have a column for each token"
    width = batch["input_ids"].shape[-1]
    other = next((key for key, value in batch.items() if value.ndim > 1 and value.shape[-1] != width), None)
    return f"{other!r} is not as wide as input_ids" if other else ""


def labels_of(batch: Batch, shifted: bool) -> list[int]:
    """The labels of each row that count in the loss. `shifted`: the first column predicts nothing."""
    labels = batch["labels"].flatten(1) if batch["labels"].ndim > 1 else batch["labels"][:, None]
    counts: list[int] = (labels[:, 1:] if shifted and labels.shape[1] > 1 else labels).ne(-100).sum(1).tolist()
    return counts


def labels_in(batch: Batch, shifted: bool) -> int:
    return sum(labels_of(batch, shifted))


def on_host(batches: Sequence[Batch]) -> list[Batch]:
    """`batches`; masks and labels on a GPU are copied to the host. The host waits once for all, and launches no kernel."""

    def is_far(key: str, value: Any) -> bool:
        return key in ("attention_mask", "labels") and isinstance(value, Tensor) and value.device.type == "cuda"

    copies = [{key: batch[key].to("cpu", non_blocking=True) for key in batch if is_far(key, batch[key])} for batch in batches]
    if any(copies):
        torch.cuda.current_stream().synchronize()
    return [{**batch, **copied} for batch, copied in zip(batches, copies, strict=True)]


def micro_batches(
    batches: Sequence[Batch],
    law: Law,
    cut: Cut,
    rows: int,
    halvings: int,
    *,
    pad_id: int | None = None,
    shifted: bool = False,
    pairs: bool = False,
    widths: Widths = AS_LONG,
) -> list[CollatedPart]:
    """The micro-batches of a step of `batches`, each of at most `rows` rows, halved `halvings` times.

    `pad_id`: the token that pads `input_ids`. `shifted`: the label of a row's first column does not count. `pairs`: chosen and
    then rejected rows, which are split as pairs. `widths`: what a micro-batch is padded to, if its columns are known. Batches
    with values that are not one per row stay whole.
    """
    if pairs:
        parts = micro_batches([as_pairs(batch) for batch in batches], law, cut, rows, halvings, pad_id=pad_id, widths=widths)
        return [replace(part, inputs=as_halves(part.inputs)) for part in parts]
    found: list[CollatedPart] = []
    for batch, mean_over in units(batches, law, pad_id):
        count = rows_of(batch)
        if count is None:
            found.append(CollatedPart(dict(batch), 1.0, (width_of(batch),)))
            continue
        seen = on_host([batch])[0]
        lengths = lengths_of(seen)
        padded = [widths.of(length) for length in lengths] if pad_id is not None and is_padded(batch) else lengths
        labels = labels_of(seen, shifted) if law == "labels" else []
        total = sum(labels) if law == "labels" else mean_over
        first, ignored = True, 0
        for group in halved(cut(padded, rows), halvings):
            inputs = sliced(batch, list(group), max(padded[row] for row in group), pad_id)
            part = sum(labels[row] for row in group) if law == "labels" else len(group)
            if total > part == 0:  # the mean over no label is not a number
                ignored += len(group)
                continue
            weight = 1.0 if law == "sum" else part / max(1, total)
            found.append(CollatedPart(inputs, weight, tuple(lengths[row] for row in group), first=first or halvings > 0))
            first = False
        if ignored:
            found[-1] = replace(found[-1], ignored=ignored)
    return found


def ignores_rows(batches: Sequence[Batch]) -> bool:
    """Whether some rows have the label -100, over which a classifier's mean does not go."""
    labels = [batch["labels"] for batch in batches if "labels" in batch]
    return any(each.ndim == 1 and not each.is_floating_point() and bool(each.eq(-100).any()) for each in labels)


def halved(groups: Iterable[Sequence[int]], halvings: int) -> Iterable[Sequence[int]]:
    """`groups` of rows, each halved `halvings` times."""
    for group in groups:
        size = -(-len(group) // 2**halvings)
        for begin in range(0, len(group), size):
            yield group[begin : begin + size]


def units(batches: Sequence[Batch], law: Law, pad_id: int | None) -> Iterable[tuple[Batch, int]]:
    """(joined batches, the rows that a mean over rows is taken over). Only batches whose rows weigh the same are joined."""
    counts = {rows_of(batch) for batch in batches}
    joinable = law == "sum" or (law == "rows" and len(counts) == 1)
    if (
        len(batches) > 1
        and joinable
        and None not in counts
        and (pad_id is not None or len({width_of(batch) for batch in batches}) == 1)
        and all(known_columns(batch) and ("attention_mask" in batch or "input_ids" not in batch) for batch in batches)
        and len({frozenset((key, fixed_shape(key, value)) for key, value in batch.items()) for batch in batches}) == 1
    ):
        yield concatenated(batches, pad_id), rows_of(batches[0]) or 1
        return
    for batch in batches:
        yield batch, rows_of(batch) or 1


def fixed_shape(key: str, value: Tensor) -> torch.Size:
    """The shape of a row's value without its columns, which padding makes equal; no other value is padded."""
    return value.shape[1:-1] if key == "input_ids" or key in PADDING else value.shape[1:]


def known_columns(batch: Batch) -> bool:
    """Whether each value that is as wide as `input_ids` is known to have a column for each token: others may have by chance."""
    width = width_of(batch)
    wide = [key for key, value in batch.items() if value.ndim > 1 and width in value.shape[1:]]
    return all(key == "input_ids" or key in PADDING for key in wide)


def as_pairs(batch: Batch) -> Batch:
    """A batch of chosen and then rejected rows, (2 x pairs, width), with an entry (2, width) for each pair."""
    return {key: value.unflatten(0, (2, -1)).transpose(0, 1) if key in HALVES else value for key, value in batch.items()}


def as_halves(batch: Batch) -> dict[str, Any]:
    """The contrary of `as_pairs`."""
    return {key: value.transpose(0, 1).flatten(0, 1).contiguous() if key in HALVES else value for key, value in batch.items()}


def first_rows(batch: Batch, rows: int, pairs: bool = False) -> Batch:
    """The first `rows` rows, or pairs, of `batch`."""
    if pairs:
        return as_halves(first_rows(as_pairs(batch), rows))
    return {key: value[:rows] for key, value in batch.items()}


def concatenated(batches: Sequence[Batch], pad_id: int | None) -> Batch:
    """The rows of all `batches`, padded to the widest."""
    found = {}
    for key in batches[0]:
        values = [batch[key] for batch in batches]
        widest = max((value.shape[-1] for value in values if value.ndim > 1), default=0)
        if any(value.ndim > 1 and value.shape[-1] < widest for value in values):
            values = [widened(value, widest, PADDING.get(key, pad_id)) for value in values]
        found[key] = torch.cat(values)
    return found


def widened(value: Tensor, width: int, filler: Any) -> Tensor:
    """`value` with columns of `filler` on the right, `width` in all."""
    return torch.nn.functional.pad(value, (0, width - value.shape[-1]), value=filler)


def sliced(batch: Batch, rows: list[int], width: int, pad_id: int | None = None) -> dict[str, Any]:
    """The `rows` of `batch`, without the columns right of `width`, or padded up to it."""
    full, found = width_of(batch), {}
    if len(rows) == rows_of(batch) and width == full:  # all of them: their order changes nothing
        return dict(batch)
    place = next(iter(batch.values())).device
    # a list would be copied for each value, and each copy waits for the device
    index: Any = torch.tensor(rows).pin_memory().to(place, non_blocking=True) if place.type == "cuda" else rows
    for key, value in batch.items():
        part = value[index if value.device == place else rows]
        wide = (key == "input_ids" or key in PADDING) and part.ndim > 1 and part.shape[-1] == full
        if wide and width != full:
            part = part[..., :width].contiguous() if width < full else widened(part, width, PADDING.get(key, pad_id))
        found[key] = part
    return found


def sent(inputs: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """`inputs` on `device`, by copies that do not wait for a GPU: those from pinned memory."""
    if device.type != "cuda":
        return dict(inputs)
    on_host = {key for key, value in inputs.items() if isinstance(value, Tensor) and value.device.type == "cpu"}
    pinned = {key: value.pin_memory() if key in on_host else value for key, value in inputs.items()}
    return dict(send_to_device(pinned, device, non_blocking=True))
