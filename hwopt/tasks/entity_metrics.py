"""Metrics of token classification: entities found and counted by seqeval.

An entity is a run of words of one type. Its tags are "B-TYPE", "I-TYPE", "E-TYPE", "S-TYPE", the same in the letters of BILOU and
BMEWO, or any other text but "O", which is then a type of its own. A predicted entity is correct if its first word, its last word
and its type are.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from hwopt.tasks.metrics import GatheredMetrics
from hwopt.tasks.prepared import IGNORED
from hwopt.text import truncate

ROW_END = -1  # between the words of two samples, in both predictions and targets

OTHER_LETTERS = {"L": "E", "U": "S", "M": "I", "W": "S"}
"""Letter of BILOU or BMEWO -> the one that seqeval knows for the same place in an entity."""


def tags_for_seqeval(tags: Sequence[str]) -> list[str]:
    """All `tags` of a data set as seqeval reads them; "L-PER" as "E-PER" if there is a "B-PER"."""
    return [tag_for_seqeval(tag, starts="B" + tag[1:] in tags) for tag in tags]


def tag_for_seqeval(tag: str, starts: bool = False) -> str:
    """`tag` with a prefix: "NOUN" as "I-NOUN", "B" as "B-_", "." as "O". `starts`: another tag begins such an entity.

    seqeval takes the first letter of any tag for its prefix: it reads "ORG" as "O", and "NOUN" as the type "OUN".
    """
    letter, dash, kind = tag.partition("-")
    letter = OTHER_LETTERS.get(letter, letter) if starts and dash else letter
    if letter in (".", "O") and (dash or not kind):
        return "O"
    return f"{letter}-{kind or '_'}" if letter in ("B", "I", "E", "S") else f"I-{tag}"


def misplaced_tags(rows: Sequence[Sequence[str]], place: Callable[[int], str]) -> list[str]:
    """A line about entities that start with a tag such as "I-PER", in data where most start with a "B-"; empty if none do.

    `place`: number of a row -> where it is. Files in which "B-" only separates neighbours (IOB1) get no line.
    """
    known = sorted({tag for tags in rows for tag in tags})
    read = {"O": "O"} | dict(zip(known, tags_for_seqeval(known), strict=True))
    counts = Counter(pair for tags in rows for pair in pairwise(["O", *tags]))  # (tag before, tag) -> how often
    starts = {pair: read[pair[1]] for pair in counts if read[pair[0]][0] not in "BI" or read[pair[0]][1:] != read[pair[1]][1:]}
    usual = sum(counts[pair] for pair, tag in starts.items() if tag[0] in "BS")
    odd = [pair for pair, tag in starts.items() if tag[0] in "IE" and tag[1:] == pair[1][1:]]
    number = sum(counts[pair] for pair in odd)
    if not 0 < number <= usual:
        return []
    row, (before, tag) = next((row, pair) for row, tags in enumerate(rows) for pair in pairwise(["O", *tags]) if pair in odd)
    return [
        f"entities without a 'B-' tag at their start: {number:,}. The first one is in {place(row)}: {truncate(tag)} after "
        f"{truncate(before)}. The metrics count it as an entity of its own. Write 'B-' for the first word of each entity"
    ]


class EntityMetrics(GatheredMetrics):
    """loss, accuracy (of words), precision, recall and f1 of the entities of all types together.

    `details` has the metrics of each type.
    """

    def __init__(self, names: Sequence[str], device: torch.device | str) -> None:
        """`names`: the tag of each label number."""
        super().__init__(device)
        self.tags = np.array(tags_for_seqeval(names), dtype=object)
        self.types = sorted({tag.partition("-")[2] for tag in self.tags if tag != "O"})

    def _pair(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        predictions = torch.where(targets == IGNORED, IGNORED, outputs.logits.argmax(-1))  # (rows, width)
        pair = torch.stack([predictions, targets])
        return torch.nn.functional.pad(pair, (0, 1), value=ROW_END).flatten(1)  # (2, rows x (width + 1))

    def compute(self) -> dict[str, float]:
        from seqeval.metrics.sequence_labeling import accuracy_score, precision_recall_fscore_support

        actual, predicted = self._sentences()
        if not any(actual):
            return super().compute() | dict.fromkeys(("accuracy", "precision", "recall", "f1"), math.nan)
        *scores, _ = precision_recall_fscore_support(actual, predicted, average="micro", zero_division=0)
        values = {name: float(score) for name, score in zip(("precision", "recall", "f1"), scores, strict=True)}
        return super().compute() | {"accuracy": float(accuracy_score(actual, predicted))} | values

    def details(self) -> dict[str, Any]:
        """classes: label (the type), precision, recall, f1, support of each type of entity."""
        from seqeval.metrics.sequence_labeling import precision_recall_fscore_support

        actual, predicted = self._sentences()
        tags = {tag for sentence in (*actual, *predicted) for tag in sentence} - {"O"}
        present = sorted({tag.partition("-")[2] for tag in tags})  # seqeval's scores are in this order
        scores = precision_recall_fscore_support(actual, predicted, average=None, zero_division=0) if present else ()
        columns = [dict(zip(present, column.tolist(), strict=True)) for column in scores] or [{}, {}, {}, {}]
        rows = [(kind, *(column.get(kind, 0.0) for column in columns)) for kind in self.types]
        keys = ("label", "precision", "recall", "f1")
        return {"classes": [dict(zip(keys, row, strict=False)) | {"support": int(row[-1])} for row in rows]}

    def _sentences(self) -> tuple[list[list[str]], list[list[str]]]:
        """The true and the predicted tags of the labelled words of each sample."""
        predicted, actual = self.gathered()
        kept = actual != IGNORED
        predicted, actual = predicted[kept], actual[kept]
        ends = np.flatnonzero(actual == ROW_END)
        starts = [0, *(ends[:-1] + 1)]
        tagged = (self.tags[actual], self.tags[predicted])  # those of row ends are not used
        found = [[tags[start:end].tolist() for start, end in zip(starts, ends, strict=False)] for tags in tagged]
        return found[0], found[1]
