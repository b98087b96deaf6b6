"""How a task shows a sample: its decoded tokens in parts, and its label."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Span:
    """A part of a sample's text."""

    text: str
    in_loss: bool
    """The model is trained to predict this part."""


@dataclass(frozen=True)
class Shown:
    """A sample as `hwopt plan --sample 1` shows it."""

    spans: tuple[Span, ...]
    """Joined, they are the decoded tokens, special tokens included."""
    label: str | None = None
    """The label of the sample as a whole."""
    tokens_in_loss: int | None = None
    """Tokens whose prediction counts in the loss; None if the sample as a whole has a label."""


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
