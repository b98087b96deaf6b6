"""Causal language modelling: plain text in blocks, or prompts with completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hwopt.config.job import Job
from hwopt.data.bad_rows import BadRows, Places
from hwopt.data.rows import Rows
from hwopt.data.tables import text_columns
from hwopt.data.token_store import TokenStore, fingerprint, held_out_count, split_rows
from hwopt.data.tokenizer import CHUNK, Encoded, LengthLimit
from hwopt.data.tokenizer_training import tokenizer_fingerprint
from hwopt.errors import DataError
from hwopt.tasks.base import FORMAT, IGNORED, Metrics, Prepared, Task, refuse_router
from hwopt.tasks.preparation import add_tokenless_rows, make_prepared, read_sources, tokenizer_for

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from transformers import PretrainedConfig

BLOCK = 1_024
"""Tokens per block of plain text, unless the job or the model has a smaller limit."""


@dataclass(frozen=True)
class Texts:
    """Documents, or prompts with completions, and their places."""

    places: Places
    bad_rows: BadRows
    texts: list[list[str]]
    """One list per column."""

    def take(self, samples: Sequence[int]) -> Texts:
        """Some of the texts."""
        return replace(
            self,
            places=self.places.take(samples),
            texts=[[column[sample] for sample in samples] for column in self.texts],
        )


def _texts(rows: Rows, names: Sequence[str]) -> Texts:
    """The rows that have a text."""
    texts = text_columns(rows, names)
    return Texts(rows.places, rows.bad_rows, texts).take(rows.usable())


class CausalLM(Task):
    """Predict the next token."""

    kind: ClassVar[str] = "causal-lm"
    default_metric: ClassVar[str] = "eval_loss"
    metric_directions: ClassVar[dict[str, bool]] = {"loss": False, "perplexity": False}

    def prepare(self, job: Job, config: PretrainedConfig, cache: Path, seed: int, max_positions: int | None = None) -> Prepared:
        """Prepare the data.

        Plain text: documents are joined by the end-of-text token and split into blocks; every token except the first is predicted
        exactly once. Prompts: one sample per row; only the completion and the end-of-text token are predicted.
        data.eval_fraction holds out rows, or the end of a single document.
        """
        refuse_router(config, job)
        limit = LengthLimit(job.data.max_length, max_positions)
        sources = read_sources(job)
        names = job.data.text if job.data.prompt is None else (job.data.prompt, str(job.data.completion))
        train = _texts(sources.train, names)
        held_out, test = (None if rows is None else _texts(rows, names) for rows in (sources.eval, sources.test))
        fraction = job.data.eval_fraction
        if fraction is not None and len(train.texts[0]) == 1 and job.data.prompt is None:
            text = train.texts[0][0]
            at = len(text) - held_out_count(len(text), fraction, sources.train.source)
            train, held_out = replace(train, texts=[[text[:at]]]), replace(train, texts=[[text[at:]]])
        elif fraction is not None:
            kept, held = split_rows(len(train.texts[0]), fraction, seed, sources.train.source)
            train, held_out = train.take(kept.tolist()), train.take(held.tolist())
        texts = [text for column in train.texts for text in column]
        tokenizer = tokenizer_for(job, config, texts, decoder=True, cache=cache)
        stores = [None if part is None else _store(part, tokenizer, limit, cache) for part in (train, held_out, test)]
        prepared = make_prepared(stores, tokenizer, None, avoid_used=False)
        prepared.report_bad_rows(sources.train, sources.eval, sources.test)
        return prepared

    def loss(self, outputs: Any, targets: torch.Tensor) -> tuple[torch.Tensor, int | torch.Tensor]:
        """(cross-entropy summed over the labels that are not -100, their number); targets (batch, length), already shifted."""
        from torch.nn import functional

        logits = outputs.logits.float().flatten(0, 1)  # (batch x length, vocabulary)
        summed = functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")
        return summed, (targets != IGNORED).sum()

    def metrics(self, prepared: Prepared, device: torch.device | str) -> Metrics:
        """loss (nats per token) and perplexity."""
        from hwopt.tasks.metrics import TokenMetrics

        return TokenMetrics(device)


def blocks(tokens: NDArray[np.int32], length: int) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
    """(inputs, labels, offsets) of n >= 2 tokens in blocks of `length`; the last block may be shorter.

    inputs and labels have n - 1 elements: every token except the last is an input once, every token except the first a label
    once. The label of a block's last position is the first token of the next block.
    """
    import numpy as np

    inputs = len(tokens) - 1
    offsets = np.append(np.arange(0, inputs, length, dtype=np.int64), inputs)
    return tokens[:-1].astype(np.int32), tokens[1:].astype(np.int64), offsets


def prompted(
    prompt: Sequence[int], completion: Sequence[int], end: int | None, max_length: int | None
) -> tuple[list[int], list[int]]:
    """(inputs, labels) of one sample, truncated on the right to `max_length` inputs.

    Labels are shifted by one and are -100 in the prompt. The end-of-text token `end` is a label, never an input.
    """
    tokens = [*prompt, *completion, *(() if end is None else (end,))]
    if max_length is not None:
        tokens = tokens[: max_length + 1]
    masked = max(len(prompt) - 1, 0)
    return tokens[:-1], ([IGNORED] * masked + tokens[masked + 1 :])[: len(tokens) - 1]


def _store(samples: Texts, tokenizer: Any, limit: LengthLimit, cache: Path) -> TokenStore:
    """The token store of `samples`, from the cache or written now."""
    texts = samples.texts
    pairs = len(texts) == 2
    block = min(limit.max_length or BLOCK, limit.max_positions or BLOCK)
    settings = [FORMAT, CausalLM.kind, pairs, limit.max_length if pairs else block]
    key = fingerprint(settings, tokenizer_fingerprint(tokenizer), *texts)

    def make() -> tuple[dict[str, Any], dict[str, Any]]:
        if pairs:
            arrays, found = encode_prompts(texts, tokenizer, limit, samples.places)
        else:
            arrays, found = encode_blocks(texts[0], tokenizer, block, samples.places.source)
        return arrays, {
            "kind": CausalLM.kind,
            "label_names": None,
            "labels_per_token": True,
            "max_length": limit.max_length if pairs else block,
            **found.meta(tokenizer),
        }

    store = TokenStore.cached(cache / "tokens" / key, make)
    add_tokenless_rows(store, samples.places, samples.bad_rows)
    if pairs:
        skipped = {sample for sample, _ in store.meta["left_out"]}
        limit.check(store.lengths, samples.places.take([s for s in range(len(texts[0])) if s not in skipped]))
    return store


def encode_blocks(texts: list[str], tokenizer: Any, block: int, source: str) -> tuple[dict[str, Any], Encoded]:
    """(arrays of a token store, tokens) of documents, joined and split into blocks."""
    import numpy as np

    end = tokenizer.eos_token_id
    stream: list[NDArray[np.int32]] = []
    for start in range(0, len(texts), CHUNK):
        for ids in _tokens(tokenizer, texts[start : start + CHUNK], special=True):
            if stream and end is not None:
                stream.append(np.array([end], np.int32))
            stream.append(np.asarray(ids, np.int32))
    tokens = np.concatenate(stream)
    if len(tokens) < 2:
        raise DataError(f"{source}: has {len(tokens)} tokens; language modelling needs at least two")
    inputs, labels, offsets = blocks(tokens, block)
    lengths = np.diff(offsets)
    arrays = {"input_ids": inputs, "labels": labels, "offsets": offsets, "counts": lengths.astype(np.int32)}
    return arrays, Encoded(inputs, None, lengths, 0)


def encode_prompts(texts: list[list[str]], tokenizer: Any, limit: LengthLimit, places: Places) -> tuple[dict[str, Any], Encoded]:
    """(arrays of a token store, tokens) of prompts with completions, one sample per row."""
    import numpy as np

    inputs: list[NDArray[np.int32]] = []
    labels: list[NDArray[np.int64]] = []
    truncated = 0
    skipped: dict[int, str] = {}
    end = tokenizer.eos_token_id
    for start in range(0, len(texts[0]), CHUNK):
        prompts = _tokens(tokenizer, texts[0][start : start + CHUNK], special=True)
        completions = _tokens(tokenizer, texts[1][start : start + CHUNK], special=False)
        for sample, (prompt, completion) in enumerate(zip(prompts, completions, strict=True), start):
            if not completion:
                skipped[sample] = "has a completion without tokens"
                continue
            ids, targets = prompted(prompt, completion, end, limit.max_length)
            limit.check([len(ids)], places, sample)
            if all(target == IGNORED for target in targets):
                skipped[sample] = (
                    f"has no completion after truncation: the prompt has {len(prompt):,} tokens, "
                    f"data.max_length = {limit.max_length}"
                )
                continue
            truncated += len(prompt) + len(completion) > len(ids) + (end is None)
            inputs.append(np.array(ids, np.int32))
            labels.append(np.array(targets, np.int64))
    if not inputs:
        raise DataError(f"{places.source}: no row has a token to predict; {places.at(0)} {skipped[0]}")
    lengths = np.array([len(one) for one in inputs], np.int64)
    found = Encoded(np.concatenate(inputs), None, lengths, truncated, skipped)
    arrays = {
        "input_ids": found.ids,
        "labels": np.concatenate(labels),
        "offsets": np.concatenate([[0], np.cumsum(lengths)]),
        "counts": np.array([(one != IGNORED).sum() for one in labels], np.int32),
    }
    return arrays, found


def _tokens(tokenizer: Any, texts: list[str], special: bool) -> list[list[int]]:
    """The tokens of each text. `special`: with the special tokens that the tokenizer adds at the start, but not at the end."""
    found: list[list[int]] = tokenizer(
        texts, add_special_tokens=special, return_attention_mask=False, return_token_type_ids=False, verbose=False
    )["input_ids"]
    if special and tokenizer.eos_token_id is not None and tokenizer("")["input_ids"][-1:] == [tokenizer.eos_token_id]:
        return [ids[:-1] for ids in found]
    return found
