"""One training sample as the model sees it: its tokens decoded, and the part of them that counts in the loss."""

from __future__ import annotations

from dataclasses import dataclass

from hwopt.errors import InputError
from hwopt.tasks.base import Task
from hwopt.tasks.prepared import Prepared
from hwopt.tasks.spans import Span


@dataclass(frozen=True)
class Preview:
    """One training sample, and the number of samples beside it."""

    sample: int
    """Counts from 1."""
    samples: int
    held_out: dict[str, int]
    """Samples of the evaluation and of the test data."""
    tokens: int | None
    """Length of the input; None for an image."""
    tokens_in_loss: int | None
    """Tokens to predict; None if the sample as a whole has a label."""
    label: str | None
    spans: tuple[Span, ...]
    """Joined, they are the decoded tokens, special tokens included."""
    notes: tuple[str, ...] = ()
    """Truncated texts and skipped rows."""


def preview_sample(task: Task, prepared: Prepared, sample: int) -> Preview:
    """Training sample `sample` (from 1) of `prepared`. Raises InputError if there are fewer samples."""
    store = prepared.train
    if not 1 <= sample <= len(store):
        raise InputError(f"--sample {sample}: the training data has {len(store):,} samples; give a number from 1 to {len(store)}")
    row = store.row(sample - 1)
    shown = task.show(prepared, row)
    held_out = {which: len(part) for which, part in (("evaluation", prepared.eval), ("test", prepared.test)) if part is not None}
    return Preview(
        sample,
        len(store),
        held_out,
        int(store.lengths[sample - 1]) if task.facts.inputs == "tokens" else None,
        shown.tokens_in_loss,
        shown.label,
        shown.spans,
        (*prepared.notes, *prepared.warnings),
    )
