"""Metrics of token classification: entities found as seqeval and conlleval count them, in sums that stay on the device.

An entity is a run of words of one type. Its tags are "B-TYPE", "I-TYPE", "E-TYPE", "S-TYPE", or any other text but "O", which is
then a type of its own. A predicted entity is correct if its first word, its last word and its type are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from hwopt.tasks.metrics import LossMetrics, class_rows, f1_score, over_ranks
from hwopt.tasks.prepared import IGNORED

OUTSIDE, BEGIN, INSIDE, END, SINGLE, OTHER = range(6)
PREFIXES = {"O": OUTSIDE, ".": OUTSIDE, "B": BEGIN, "I": INSIDE, "E": END, "S": SINGLE}


def parts_of(tag: str) -> tuple[int, str]:
    """(prefix, type) of a tag: "B-PER" is (BEGIN, "PER"), "B" is (BEGIN, "_"), "NOUN" is (OTHER, "NOUN").

    seqeval takes the first letter of any tag for its prefix: it reads "ORG" as "O", and "NOUN" as the type "OUN".
    """
    letter, dash, kind = tag.partition("-")
    if letter in PREFIXES and (dash or not kind):
        return PREFIXES[letter], kind or "_"
    return OTHER, tag


class Chunks(NamedTuple):
    """Where entities begin and end, bool and int64 (rows, width)."""

    starts: torch.Tensor
    ends: torch.Tensor
    """Position of the last word of the entity that begins at or after each position."""


class EntityMetrics(LossMetrics):
    """loss, accuracy (of words), precision, recall and f1 of the entities of all types together.

    `details` has the metrics of each type.
    """

    def __init__(self, names: Sequence[str], device: torch.device | str) -> None:
        """`names`: the tag of each label number."""
        parts = [parts_of(name) for name in names]
        self.types = sorted({kind for prefix, kind in parts if prefix != OUTSIDE})
        super().__init__(device, extra=2 + 3 * len(self.types))
        numbers = {kind: number for number, kind in enumerate(self.types)}
        # a label -100 has the number behind the last tag, which is outside
        self._prefix = torch.tensor([prefix for prefix, _ in parts] + [OUTSIDE], device=device)
        self._type = torch.tensor([numbers.get(kind, -1) if prefix else -1 for prefix, kind in parts] + [-1], device=device)

    def details(self) -> dict[str, Any]:
        """classes: label (the type), precision, recall, f1, support of each type of entity."""
        return {"classes": class_rows(self.types, *self._per_type(over_ranks(self._sums).tolist()))}

    def _count(self, outputs: Any, targets: torch.Tensor, extra: torch.Tensor) -> None:
        labelled = targets != IGNORED  # (rows, width)
        predictions = outputs.logits.argmax(-1)
        extra[0] += ((predictions == targets) & labelled).sum()
        extra[1] += labelled.sum()
        if not self.types:
            return
        outside = len(self._prefix) - 1
        actual, found = (torch.where(labelled, tags, outside) for tags in (targets, predictions))
        here, there = self.chunks(actual, labelled), self.chunks(found, labelled)
        kind, guess = self._type[actual], self._type[found]
        correct = here.starts & there.starts & (kind == guess) & (here.ends == there.ends)
        sums = extra[2:].view(3, len(self.types))
        for row, (starts, kinds) in enumerate(((correct, kind), (there.starts, guess), (here.starts, kind))):
            sums[row].index_add_(0, kinds.clamp(min=0).flatten(), starts.double().flatten())

    def chunks(self, tags: torch.Tensor, labelled: torch.Tensor) -> Chunks:
        """The entities of `tags` (rows, width); positions that are not `labelled` are skipped."""
        width = tags.shape[1]
        places = torch.arange(width, device=tags.device).expand_as(tags)
        before = torch.where(labelled, places, -1).cummax(1).values  # the last labelled position up to here
        before = torch.cat([torch.full_like(before[:, :1], -1), before[:, :-1]], 1)
        earlier = torch.where(before < 0, len(self._prefix) - 1, tags.gather(1, before.clamp(min=0)))
        prefix, kind, last, last_kind = self._prefix[tags], self._type[tags], self._prefix[earlier], self._type[earlier]
        changed = kind != last_kind
        starts = (prefix == BEGIN) | (prefix == SINGLE) | ((prefix != OUTSIDE) & changed)
        starts |= ((prefix == END) | (prefix == INSIDE)) & ((last == END) | (last == SINGLE) | (last == OUTSIDE))
        ended = (last == END) | (last == SINGLE) | ((last != OUTSIDE) & changed)
        ended |= ((last == BEGIN) | (last == INSIDE)) & ((prefix == BEGIN) | (prefix == SINGLE) | (prefix == OUTSIDE))
        # the word before position p is the last one of an entity; an entity at the end of the row ends at the last labelled word
        final = torch.where(labelled, places, -1).amax(1, keepdim=True)
        closing = torch.where(ended & labelled, before, width)  # (rows, width), at the position behind the end
        closing = torch.cat([closing[:, 1:], torch.full_like(closing[:, :1], width)], 1)
        ends = closing.flip(1).cummin(1).values.flip(1)
        return Chunks(starts & labelled, torch.minimum(ends, final))

    def _per_type(self, sums: list[float]) -> tuple[list[float], list[float], list[float]]:
        """(correct entities, predicted ones, actual ones) of each type."""
        n = len(self.types)
        return sums[4 : 4 + n], sums[4 + n : 4 + 2 * n], sums[4 + 2 * n :]

    def _values(self, sums: list[float]) -> dict[str, float]:
        right, words = sums[2:4]
        hits, predicted, actual = map(sum, self._per_type(sums))
        return {
            **super()._values(sums),
            "accuracy": right / words if words else math.nan,
            "precision": hits / predicted if predicted else 0.0,
            "recall": hits / actual if actual else 0.0,
            "f1": f1_score(hits, predicted, actual),
        }
