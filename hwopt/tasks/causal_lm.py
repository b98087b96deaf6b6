"""Causal language modelling: plain text in blocks, and prompts with completions."""

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
from hwopt.data.tokenizer import CHUNK, Encoded, Limit
from hwopt.data.tokenizer_training import tokenizer_fingerprint
from hwopt.errors import DataError
from hwopt.tasks.base import FORMAT, IGNORED, Metrics, Prepared, Task, refuse_router
from hwopt.tasks.preparation import add_tokenless_rows, finish, limit_of, read_sources, tokenizer_for

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from transformers import PretrainedConfig

BLOCK = 1_024
"""Tokens of a block of plain text, where neither the job nor the model says less."""


@dataclass(frozen=True)
class Texts:
    """Documents, or prompts and completions, and where they come from."""

    places: Places
    left_out: BadRows
    texts: list[list[str]]
    """One list a column."""

    def take(self, samples: Sequence[int]) -> Texts:
        return replace(
            self,
            places=self.places.take(samples),
            texts=[[column[sample] for sample in samples] for column in self.texts],
        )


def _texts(rows: Rows, names: Sequence[str]) -> Texts:
    """Every row that has a text."""
    texts = text_columns(rows, names)
    return Texts(rows.places, rows.left_out, texts).take(rows.kept())


class CausalLM(Task):
    kind: ClassVar[str] = "causal-lm"
    default_metric: ClassVar[str] = "eval_loss"
    rising: ClassVar[dict[str, bool]] = {"loss": False, "perplexity": False}

    def prepare(self, job: Job, config: PretrainedConfig, cache: Path, seed: int, max_positions: int | None = None) -> Prepared:
        """Plain text: documents are joined by the end-of-text token and cut into blocks, so that each token but the very first
        is predicted exactly once. Prompts: one sample a row, only the completion and the end of text are predicted.

        data.eval_fraction holds rows out; of a single document, its end.
        """
        refuse_router(config, job)
        limit = limit_of(job, max_positions)
        rows, other = read_sources(job)
        names = job.data.text if job.data.prompt is None else (job.data.prompt, str(job.data.completion))
        train = _texts(rows, names)
        held_out = None if other is None else _texts(other, names)
        fraction = job.data.eval_fraction
        if fraction is not None and len(train.texts[0]) == 1 and job.data.prompt is None:
            text = train.texts[0][0]
            at = len(text) - held_out_count(len(text), fraction, rows.source)
            train, held_out = replace(train, texts=[[text[:at]]]), replace(train, texts=[[text[at:]]])
        elif fraction is not None:
            kept, held = split_rows(len(train.texts[0]), fraction, seed, rows.source)
            train, held_out = train.take(kept.tolist()), train.take(held.tolist())
        texts = [text for column in train.texts for text in column]
        tokenizer = tokenizer_for(job, config, texts, decoder=True, cache=cache)
        first = _store(train, tokenizer, limit, cache)
        second = None if held_out is None else _store(held_out, tokenizer, limit, cache)
        done = finish(first, second, tokenizer, None, avoid_used=False)
        done.leave_out(rows, other)
        return done

    def loss(self, outputs: Any, targets: torch.Tensor) -> tuple[torch.Tensor, int | torch.Tensor]:
        """Cross-entropy summed over the labels that are not -100; targets (batch, length), already shifted."""
        from torch.nn import functional

        logits = outputs.logits.float().flatten(0, 1)  # (batch x length, vocabulary)
        summed = functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")
        return summed, (targets != IGNORED).sum()

    def metrics(self, prepared: Prepared, device: torch.device | str) -> Metrics:
        """loss (nats a token) and perplexity."""
        from hwopt.tasks.metrics import TokenMetrics

        return TokenMetrics(device)


def blocks(tokens: NDArray[np.int32], length: int) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
    """(inputs, labels, offsets) of a stream of n >= 2 tokens in samples of `length`, the last one maybe shorter.

    inputs and labels have n - 1 elements: each token but the last is read once, each but the first predicted once. The label of
    a block's last position is the first token of the next block, so that no token is lost and none is read twice.
    """
    import numpy as np

    read = len(tokens) - 1
    offsets = np.append(np.arange(0, read, length, dtype=np.int64), read)
    return tokens[:-1].astype(np.int32), tokens[1:].astype(np.int64), offsets


def prompted(
    prompt: Sequence[int], completion: Sequence[int], end: int | None, max_length: int | None
) -> tuple[list[int], list[int]]:
    """(inputs, labels) of one sample: labels are shifted by one, -100 inside the prompt; at most `max_length` inputs, cut on
    the right. The end-of-text token is predicted, never read."""
    tokens = [*prompt, *completion, *(() if end is None else (end,))]
    if max_length is not None:
        tokens = tokens[: max_length + 1]
    masked = max(len(prompt) - 1, 0)
    return tokens[:-1], ([IGNORED] * masked + tokens[masked + 1 :])[: len(tokens) - 1]


def _store(samples: Texts, tokenizer: Any, limit: Limit, cache: Path) -> TokenStore:
    texts = samples.texts
    pairs = len(texts) == 2
    block = min(limit.max_length or BLOCK, limit.max_positions or BLOCK)
    settings = [FORMAT, CausalLM.kind, pairs, limit.max_length if pairs else block]
    key = fingerprint(settings, tokenizer_fingerprint(tokenizer), *texts)

    def make() -> tuple[dict[str, Any], dict[str, Any]]:
        if pairs:
            arrays, found = _prompts(texts, tokenizer, limit, samples.places)
        else:
            arrays, found = _plain(texts[0], tokenizer, block, samples.places.source)
        return arrays, {
            "kind": CausalLM.kind,
            "label_names": None,
            "labels_per_token": True,
            "max_length": limit.max_length if pairs else block,
            **found.meta(tokenizer),
        }

    store = TokenStore.cached(cache / "tokens" / key, make)
    add_tokenless_rows(store, samples.places, samples.left_out)
    if pairs:
        without = {sample for sample, _ in store.meta["left_out"]}
        limit.check(store.lengths, samples.places.take([s for s in range(len(texts[0])) if s not in without]))
    return store


def _plain(texts: list[str], tokenizer: Any, block: int, source: str) -> tuple[dict[str, Any], Encoded]:
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
        raise DataError(f"{source}: its text has {len(tokens)} tokens; language modelling needs two at least")
    inputs, labels, offsets = blocks(tokens, block)
    lengths = np.diff(offsets)
    arrays = {"input_ids": inputs, "labels": labels, "offsets": offsets, "counts": lengths.astype(np.int32)}
    return arrays, Encoded(inputs, None, lengths, 0)


def _prompts(texts: list[list[str]], tokenizer: Any, limit: Limit, places: Places) -> tuple[dict[str, Any], Encoded]:
    import numpy as np

    inputs: list[NDArray[np.int32]] = []
    labels: list[NDArray[np.int64]] = []
    cut = 0
    left_out: dict[int, str] = {}
    end = tokenizer.eos_token_id
    for start in range(0, len(texts[0]), CHUNK):
        prompts = _tokens(tokenizer, texts[0][start : start + CHUNK], special=True)
        completions = _tokens(tokenizer, texts[1][start : start + CHUNK], special=False)
        for sample, (prompt, completion) in enumerate(zip(prompts, completions, strict=True), start):
            if not completion:
                left_out[sample] = "the completion has no tokens"
                continue
            read, predicted = prompted(prompt, completion, end, limit.max_length)
            limit.check([len(read)], places, sample)
            if all(label == IGNORED for label in predicted):
                left_out[sample] = (
                    f"nothing of the completion is left to predict: the prompt has {len(prompt):,} tokens, "
                    f"data.max_length = {limit.max_length}"
                )
                continue
            cut += len(prompt) + len(completion) > len(read) + (end is None)
            inputs.append(np.array(read, np.int32))
            labels.append(np.array(predicted, np.int64))
    if not inputs:
        raise DataError(f"{places.source}: no row has anything to predict: {left_out[0]}")
    lengths = np.array([len(one) for one in inputs], np.int64)
    found = Encoded(np.concatenate(inputs), None, lengths, cut, left_out)
    arrays = {
        "input_ids": found.ids,
        "labels": np.concatenate(labels),
        "offsets": np.concatenate([[0], np.cumsum(lengths)]),
        "counts": np.array([(one != IGNORED).sum() for one in labels], np.int32),
    }
    return arrays, found


def _tokens(tokenizer: Any, texts: list[str], special: bool) -> list[list[int]]:
    """Tokens of each text; `special`: with the beginning that the tokenizer's template puts there, never with its end."""
    found: list[list[int]] = tokenizer(
        texts, add_special_tokens=special, return_attention_mask=False, return_token_type_ids=False, verbose=False
    )["input_ids"]
    if special and tokenizer.eos_token_id is not None and tokenizer("")["input_ids"][-1:] == [tokenizer.eos_token_id]:
        return [ids[:-1] for ids in found]
    return found
