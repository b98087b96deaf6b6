"""One training sample as the model sees it: its tokens decoded, and the part of them that counts in the loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hwopt.errors import InputError
from hwopt.tasks.preparation import described
from hwopt.tasks.prepared import Prepared


@dataclass(frozen=True)
class Span:
    text: str
    in_loss: bool  # the model is trained to predict this part


@dataclass(frozen=True)
class Shown:
    """A sample as `hwopt plan --sample 1` shows it."""

    spans: tuple[Span, ...]  # joined, they are the decoded tokens, special tokens included
    label: str | None = None  # the label of the sample as a whole
    tokens_in_loss: int | None = None  # tokens whose prediction counts in the loss; None if the sample as a whole has a label


def spans_of(tokenizer: Any, tokens: Sequence[int], in_loss: Sequence[bool]) -> tuple[Span, ...]:
    """The decoded `tokens`, split at each change of `in_loss` (one per token, more are ignored).

    A part is the text that its tokens add to the decoded tokens before it: decoded alone, it may lack a leading space.
    """
    spans: list[Span] = []
    before, start = "", 0
    for end in range(1, len(tokens) + 1):
        if end < len(tokens) and in_loss[end] == in_loss[start]:
            continue
        text = str(tokenizer.decode(tokens[:end], skip_special_tokens=False, clean_up_tokenization_spaces=False))
        added = text[len(before) :] if text.startswith(before) else str(tokenizer.decode(tokens[start:end]))
        spans.append(Span(added, in_loss[start]))
        before, start = text, end
    return tuple(spans)


@dataclass(frozen=True, kw_only=True)
class Preview(Shown):
    """One training sample, and the number of samples beside it."""

    sample: int  # counts from 1
    samples: int
    held_out: dict[str, int]  # samples of the evaluation and of the test data
    tokens: int | None  # length of the input; None for an image
    notes: tuple[str, ...] = ()  # truncated texts and skipped rows


def preview_sample(show: Callable[[Prepared, Mapping[str, Any]], Shown], prepared: Prepared, sample: int) -> Preview:
    """Training sample `sample` (from 1) of `prepared`, by `Task.show`. Raises InputError if there are fewer samples."""
    store = prepared.train
    if not 1 <= sample <= len(store):
        raise InputError(f"--sample {sample}: the training data has {len(store):,} samples; give a number from 1 to {len(store)}")
    row = store.row(sample - 1)
    held_out = {described(part): len(store) for part, store in prepared.parts.items() if part != "train"}
    return Preview(
        **vars(show(prepared, row)),
        sample=sample,
        samples=len(store),
        held_out=held_out,
        tokens=int(store.lengths[sample - 1]) if "input_ids" in row else None,
        notes=(*prepared.notes, *prepared.warnings),
    )
