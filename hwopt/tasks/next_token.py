"""Samples in which each token is predicted from the ones before it: texts, documents in blocks, prompts with completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hwopt.data.answer_checks import common_length
from hwopt.data.bad_rows import Places
from hwopt.data.stores.chunks import Chunks
from hwopt.data.tokenizer import CHUNK, Encoding, LengthLimit, tokens_of
from hwopt.errors import DataError
from hwopt.tasks.prepared import IGNORED

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray


def blocks(tokens: NDArray[np.int32], length: int) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
    """(inputs, labels, offsets) of n >= 2 tokens in blocks of `length`; the last block may be shorter.

    inputs and labels have n - 1 elements: every token except the last is an input once, every token except the first a label
    once. The label of a block's last position is the first token of the next block.
    """
    import numpy as np

    inputs = len(tokens) - 1
    offsets = np.append(np.arange(0, inputs, length, dtype=np.int64), inputs)
    return tokens[:-1].astype(np.int32), tokens[1:].astype(np.int64), offsets


def ended(tokens: Sequence[int], end: int | None) -> list[int]:
    """`tokens` with the end-of-text token `end` behind them, once; None: the tokenizer has none."""
    return [*tokens, *(() if end is None or tokens[-1:] == [end] else (end,))]


class SampleArrays:
    """Collects samples of tokens with a label each in `chunks`, for the arrays of a token store."""

    def __init__(self, places: Places, limit: LengthLimit, chunks: Chunks) -> None:
        self.places, self.limit, self.chunks, self.state = places, limit, chunks, chunks.state
        self.skipped: list[tuple[int, str]] = self.state.setdefault("skipped", [])

    def starts(self, samples: int) -> range:
        """The first sample of each group of `CHUNK` that are still to be added."""
        return range(self.chunks.done, samples, CHUNK)

    def skip(self, sample: int, reason: str) -> None:
        """Leave a sample out."""
        self.skipped.append((sample, reason))
        self.chunks.done = sample + 1

    def add(self, sample: int, tokens: Sequence[int], labels: Sequence[int], reason: str, truncated: bool = False) -> None:
        """Add a sample; skip it for this `reason` if it has no label."""
        import numpy as np

        self.limit.check([len(tokens)], self.places, sample)
        array = np.array(labels, np.int64)
        if not (counted := int((array != IGNORED).sum())):
            return self.skip(sample, reason)
        self.state["truncated"] = self.state.get("truncated", 0) + truncated
        sizes = np.array([len(tokens), counted], np.int64)
        return self.chunks.add(sample + 1, {"ids": np.array(tokens, np.int32), "labels": array, "sizes": sizes})

    def add_shifted(self, sample: int, tokens: Sequence[int], labels: Sequence[int], what: str) -> None:
        """Add a sample, truncated on the right; skip it if no label is left (`what` is then missing).

        data.max_length counts tokens as TRL does: also the one behind the last input, which is only a label.
        """
        longest = self.limit.max_length
        kept = len(tokens) if longest is None else min(longest - 1, len(tokens))
        reason = f"has {what}: data.max_length = {longest}, {len(tokens):,} tokens"
        self.add(sample, tokens[:kept], labels[:kept], reason, kept < len(tokens))

    def encoding(self, **meta: Any) -> Encoding:
        """The arrays of all samples, and `meta`. Raises DataError if no sample is left."""
        import numpy as np

        sizes = self.chunks.array("sizes", np.int64).reshape(-1, 2)  # (samples, tokens and labels)
        if not len(sizes):
            raise DataError(f"{self.places.source}: no row has a token to predict; {self.places.at(0)} {self.skipped[0][1]}")
        ids, labels = self.chunks.array("ids", np.int32), self.chunks.array("labels", np.int64)
        arrays = {"input_ids": ids, "lengths": sizes[:, 0], "labels": labels, "counts": sizes[:, 1].astype(np.int32)}
        return arrays, {"cut": self.state.get("truncated", 0), "left_out": self.skipped, **meta}


def encode_blocks(texts: Sequence[str], tokenizer: Any, block: int, source: str, chunks: Chunks) -> Encoding:
    import numpy as np

    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for start in range(chunks.done, len(texts), CHUNK):
        found = tokens_of(tokenizer, list(texts[start : start + CHUNK]))
        documents = [np.array([*(end if start + number else ()), *ids], np.int32) for number, ids in enumerate(found)]
        lengths = np.array([*map(len, documents)], np.int64)
        chunks.add(start + len(found), {"ids": np.concatenate(documents), "lengths": lengths})
    tokens = chunks.array("ids", np.int32)
    if len(tokens) < 2:
        raise DataError(f"{source}: has {len(tokens)} tokens; language modelling needs at least two")
    inputs, labels, offsets = blocks(tokens, block)
    lengths = np.diff(offsets)
    documents_end = np.cumsum(chunks.array("lengths", np.int64))
    begins = np.concatenate([[0], documents_end[:-1] + len(end)])
    arrays = {
        "input_ids": inputs,
        "lengths": lengths,
        "labels": labels,
        "counts": lengths.astype(np.int32),
        "documents": np.searchsorted(begins, offsets[:-1], side="right") - 1,
    }
    return arrays, {"cut": 0, "left_out": [], "max_length": block}


def encode_texts(texts: Sequence[str], tokenizer: Any, limit: LengthLimit, places: Places, chunks: Chunks) -> Encoding:
    found = SampleArrays(places, limit, chunks)
    for start in found.starts(len(texts)):
        for sample, ids in enumerate(tokens_of(tokenizer, list(texts[start : start + CHUNK])), start):
            tokens = ended(ids, tokenizer.eos_token_id)
            found.add_shifted(sample, tokens[:-1], tokens[1:], "fewer than two tokens")
    return found.encoding()


def encode_prompts(
    texts: Sequence[Sequence[str]], tokenizer: Any, limit: LengthLimit, places: Places, chunks: Chunks
) -> Encoding:
    """The arrays of prompts with completions, one sample per row.

    As in TRL, the tokens are those of both texts together, and the completion begins where they differ from the prompt's own.
    """
    found = SampleArrays(places, limit, chunks)
    for start in found.starts(len(texts[0])):
        firsts, seconds = (list(column[start : start + CHUNK]) for column in texts)
        prompts = tokens_of(tokenizer, firsts)
        wholes = tokens_of(tokenizer, [first + second for first, second in zip(firsts, seconds, strict=True)])
        for sample, (prompt, whole) in enumerate(zip(prompts, wholes, strict=True), start):
            begin = common_length(prompt, whole)
            if begin == len(whole) or not seconds[sample - start]:
                found.skip(sample, "has a completion without tokens")
                continue
            found.state["merged"] = found.state.get("merged", 0) + (begin < len(prompt))
            tokens, masked = [*whole[:begin], *ended(whole[begin:], tokenizer.eos_token_id)], max(begin - 1, 0)
            what = f"no completion after truncation: the prompt has {len(prompt):,} tokens"
            found.add_shifted(sample, tokens[:-1], [IGNORED] * masked + tokens[masked + 1 :], what)
    return found.encoding(merged=found.state.get("merged", 0))


def with_router_loss(loss: Any, coefficient: float, outputs: Any, targets: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """`loss` with the load-balancing loss of a mixture of experts, as transformers and TRL add it to the mean over all labels."""
    summed, count = loss(outputs, targets)
    return summed + coefficient * outputs.aux_loss * count, count


def token_loss(
    outputs: Any, targets: torch.Tensor, weight: torch.Tensor | None = None, smoothing: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cross-entropy summed over the labels that are not -100, their number or the sum of their weights)."""
    from torch.nn import functional

    logits, labels = outputs.logits.float().flatten(0, 1), targets.flatten()  # (batch x length, classes), (batch x length,)
    summed = functional.cross_entropy(
        logits, labels, weight=weight, ignore_index=IGNORED, reduction="sum", label_smoothing=smoothing
    )
    counted = labels != IGNORED
    return summed, counted.sum() if weight is None else (weight[labels.clamp(min=0)] * counted).sum()
