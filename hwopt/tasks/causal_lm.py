"""Causal language modelling: plain text in blocks, prompts with completions, or conversations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hwopt.config.job import Job
from hwopt.data.bad_rows import BadRows, Places
from hwopt.data.chat import (
    BadConversation,
    ChatTemplate,
    Conversation,
    Turns,
    chat_columns,
    prompt_column,
    read_conversations,
    read_prompts,
    set_template,
)
from hwopt.data.rows import Rows
from hwopt.data.tables import text_columns
from hwopt.data.token_store import TokenStore, fingerprint, held_out_count, split_rows
from hwopt.data.tokenizer import CHUNK, Encoded, LengthLimit, tokens_of
from hwopt.data.tokenizer_training import tokenizer_fingerprint
from hwopt.errors import DataError
from hwopt.tasks.base import FORMAT, IGNORED, LossFunction, Metrics, Prepared, Task, refuse_router
from hwopt.tasks.prediction import Generation, Predictor, Trained
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
    """Documents, prompts with completions, or conversations, and their places."""

    places: Places
    bad_rows: BadRows
    texts: list[list[str]]
    """One list per column; empty for conversations."""
    conversations: list[Conversation] | None = None

    def __len__(self) -> int:
        return len(self.places.numbers)

    def take(self, samples: Sequence[int]) -> Texts:
        """Some of the texts."""
        return replace(
            self,
            places=self.places.take(samples),
            texts=[[column[sample] for sample in samples] for column in self.texts],
            conversations=None if self.conversations is None else [self.conversations[sample] for sample in samples],
        )


def _samples(rows: Rows, job: Job) -> Texts:
    """The rows that can be used, as the job says, or as conversations if their columns are recognised."""
    data = job.data
    if data.prompt is not None:
        return _texts(rows, (data.prompt, str(data.completion)))
    known = data.messages is None and set(data.text) <= set(rows.table.column_names)
    if columns := () if known else chat_columns(rows.table.column_names, data.messages):
        found = read_conversations(rows, columns)
        usable = rows.usable()
        return Texts(rows.places, rows.bad_rows, [], [found[row] for row in range(len(found))]).take(usable)  # type: ignore[misc]
    return _texts(rows, data.text)


def _texts(rows: Rows, names: Sequence[str]) -> Texts:
    """The rows that have a text."""
    texts = text_columns(rows, names)
    return Texts(rows.places, rows.bad_rows, texts).take(rows.usable())


class CausalLM(Task):
    """Predict the next token."""

    kind: ClassVar[str] = "causal-lm"
    default_metric: ClassVar[str] = "eval_loss"
    metric_directions: ClassVar[dict[str, bool]] = {"loss": False, "perplexity": False}
    pipeline_tag: ClassVar[str] = "text-generation"
    generates: ClassVar[bool] = True

    def prepare(self, job: Job, config: PretrainedConfig, cache: Path, seed: int, max_positions: int | None = None) -> Prepared:
        """Prepare the data.

        Plain text: documents are joined by the end-of-text token and split into blocks; every token except the first is predicted
        exactly once. Prompts: one sample per row; only the completion and the end-of-text token are predicted. Conversations:
        one sample per row, written by the chat template; only the tokens of the assistant are predicted.
        data.eval_fraction holds out rows, or the end of a single document.
        """
        refuse_router(config, job)
        limit = LengthLimit(job.data.max_length, max_positions)
        sources = read_sources(job)
        train = _samples(sources.train, job)
        held_out, test = (None if rows is None else _samples(rows, job) for rows in (sources.eval, sources.test))
        fraction = job.data.eval_fraction
        if fraction is not None and len(train) == 1 and len(train.texts) == 1:
            text = train.texts[0][0]
            at = len(text) - held_out_count(len(text), fraction, sources.train.source)
            train, held_out = replace(train, texts=[[text[:at]]]), replace(train, texts=[[text[at:]]])
        elif fraction is not None:
            kept, held = split_rows(len(train), fraction, seed, sources.train.source)
            train, held_out = train.take(kept.tolist()), train.take(held.tolist())
        texts = [text for column in train.texts for text in column]
        texts += [str(message["content"]) for conversation in train.conversations or () for message in conversation.messages]
        tokenizer = tokenizer_for(job, config, texts, decoder=True, cache=cache)
        if train.conversations is not None:
            set_template(tokenizer, job.data.chat_template)
        turns = job.data.assistant_turns
        stores = [None if part is None else _store(part, tokenizer, limit, cache, turns) for part in (train, held_out, test)]
        prepared = make_prepared(stores, tokenizer, None, avoid_used=False)
        prepared.report_bad_rows(sources.train, sources.eval, sources.test)
        return prepared

    def read_inputs(self, rows: Rows, job: Job) -> list[Any]:
        """The prompt of each row, the text that is continued, or the conversation up to the answer."""
        data, names = job.data, rows.table.column_names
        if data.prompt is None and (data.messages is not None or not set(data.text) <= set(names)):
            column = prompt_column(names, data.messages)
            if column is not None:
                return read_prompts(rows, column)
        (prompts,) = text_columns(rows, data.text if data.prompt is None else (data.prompt,))
        return prompts

    def predictor(self, trained: Trained, model: Any, generation: Generation) -> Predictor:
        """Generates the text after the prompt."""
        from hwopt.tasks.text_generator import TextGenerator

        return TextGenerator(trained, model, generation)

    def evaluation_store(self, trained: Trained, rows: Rows, cache: Path) -> TokenStore:
        """The texts as in training: in blocks, prompts with completions, or conversations."""
        data = trained.job.data
        samples = _samples(rows, trained.job)
        if samples.conversations is not None and not trained.tokenizer.chat_template:
            set_template(trained.tokenizer, data.chat_template)
        limit = LengthLimit(data.max_length, trained.max_positions)
        return _store(samples, trained.tokenizer, limit, cache, data.assistant_turns)

    def loss(self, outputs: Any, targets: torch.Tensor) -> tuple[torch.Tensor, int | torch.Tensor]:
        """(cross-entropy summed over the labels that are not -100, their number); targets (batch, length), already shifted."""
        return token_loss(outputs, targets)

    def training_loss(self, prepared: Prepared, device: torch.device | str) -> LossFunction:
        """`loss` with the job's label smoothing, as in torch's cross_entropy."""
        return partial(token_loss, smoothing=self.options.label_smoothing) if self.options.label_smoothing else self.loss

    def metrics(self, prepared: Prepared, device: torch.device | str) -> Metrics:
        """loss (nats per token) and perplexity."""
        from hwopt.tasks.metrics import TokenMetrics

        return TokenMetrics(device)


def token_loss(outputs: Any, targets: torch.Tensor, smoothing: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """(cross-entropy summed over the labels that are not -100, their number), with label smoothing."""
    from torch.nn import functional

    logits = outputs.logits.float().flatten(0, 1)  # (batch x length, vocabulary)
    summed = functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum", label_smoothing=smoothing)
    return summed, (targets != IGNORED).sum()


def blocks(tokens: NDArray[np.int32], length: int) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
    """(inputs, labels, offsets) of n >= 2 tokens in blocks of `length`; the last block may be shorter.

    inputs and labels have n - 1 elements: every token except the last is an input once, every token except the first a label
    once. The label of a block's last position is the first token of the next block.
    """
    import numpy as np

    inputs = len(tokens) - 1
    offsets = np.append(np.arange(0, inputs, length, dtype=np.int64), inputs)
    return tokens[:-1].astype(np.int32), tokens[1:].astype(np.int64), offsets


def prompted(prompt: Sequence[int], completion: Sequence[int], end: int | None) -> tuple[list[int], list[int]]:
    """(inputs, labels) of one sample.

    Labels are shifted by one and are -100 in the prompt. The end-of-text token `end` is a label, never an input.
    """
    tokens = [*prompt, *completion, *(() if end is None else (end,))]
    masked = max(len(prompt) - 1, 0)
    return tokens[:-1], ([IGNORED] * masked + tokens[masked + 1 :])[: len(tokens) - 1]


def _store(samples: Texts, tokenizer: Any, limit: LengthLimit, cache: Path, turns: Turns = "all") -> TokenStore:
    """The token store of `samples`, from the cache or written now."""
    if samples.conversations is not None:
        return _chat_store(samples, samples.conversations, ChatTemplate(tokenizer, turns), limit, cache)
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


def _chat_store(
    samples: Texts, conversations: list[Conversation], template: ChatTemplate, limit: LengthLimit, cache: Path
) -> TokenStore:
    """The token store of conversations, from the cache or written now."""
    tokenizer = template.tokenizer
    settings = [FORMAT, CausalLM.kind, "chat", limit.max_length, template.turns, tokenizer.chat_template]
    key = fingerprint(settings, tokenizer_fingerprint(tokenizer), [conversation.key for conversation in conversations])

    def make() -> tuple[dict[str, Any], dict[str, Any]]:
        collected = SampleArrays(samples.places, limit)
        for sample, conversation in enumerate(conversations):
            try:
                tokens, answer = template.encode(conversation)
            except BadConversation as error:
                collected.skipped[sample] = str(error)
                continue
            labels = [token if mask else IGNORED for token, mask in zip(tokens[1:], answer[1:], strict=True)]
            collected.add(sample, tokens[:-1], labels, "no answer after truncation")
        arrays, found = collected.finish()
        meta = {"kind": CausalLM.kind, "label_names": None, "labels_per_token": True, "max_length": limit.max_length}
        return arrays, meta | found.meta(tokenizer)

    store = TokenStore.cached(cache / "tokens" / key, make)
    add_tokenless_rows(store, samples.places, samples.bad_rows)
    skipped = {sample for sample, _ in store.meta["left_out"]}
    limit.check(store.lengths, samples.places.take([sample for sample in range(len(samples)) if sample not in skipped]))
    return store


class SampleArrays:
    """Collects samples of tokens with a label each, for the arrays of a token store."""

    def __init__(self, places: Places, limit: LengthLimit) -> None:
        self.places, self.limit = places, limit
        self.inputs: list[NDArray[np.int32]] = []
        self.labels: list[NDArray[np.int64]] = []
        self.truncated = 0
        self.skipped: dict[int, str] = {}

    def add(self, sample: int, tokens: Sequence[int], labels: Sequence[int], what: str) -> None:
        """Add a sample, truncated on the right; skip it if no label is left (`what` is then missing)."""
        import numpy as np

        longest = self.limit.max_length
        kept = len(tokens) if longest is None else min(longest, len(tokens))
        self.limit.check([kept], self.places, sample)
        if all(label == IGNORED for label in labels[:kept]):
            self.skipped[sample] = f"has {what}: data.max_length = {longest}, {len(tokens):,} tokens"
            return
        self.truncated += kept < len(tokens)
        self.inputs.append(np.array(tokens[:kept], np.int32))
        self.labels.append(np.array(labels[:kept], np.int64))

    def finish(self) -> tuple[dict[str, Any], Encoded]:
        """(arrays of a token store, tokens). Raises DataError if no sample is left."""
        import numpy as np

        if not self.inputs:
            raise DataError(f"{self.places.source}: no row has a token to predict; {self.places.at(0)} {self.skipped[0]}")
        lengths = np.array([len(one) for one in self.inputs], np.int64)
        found = Encoded(np.concatenate(self.inputs), None, lengths, self.truncated, self.skipped)
        arrays = {
            "input_ids": found.ids,
            "labels": np.concatenate(self.labels),
            "offsets": np.concatenate([[0], np.cumsum(lengths)]),
            "counts": np.array([(one != IGNORED).sum() for one in self.labels], np.int32),
        }
        return arrays, found


def encode_blocks(texts: list[str], tokenizer: Any, block: int, source: str) -> tuple[dict[str, Any], Encoded]:
    """(arrays of a token store, tokens) of documents, joined and split into blocks."""
    import numpy as np

    end = tokenizer.eos_token_id
    stream: list[NDArray[np.int32]] = []
    for start in range(0, len(texts), CHUNK):
        for ids in tokens_of(tokenizer, texts[start : start + CHUNK], special=True):
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
    found = SampleArrays(places, limit)
    end = tokenizer.eos_token_id
    for start in range(0, len(texts[0]), CHUNK):
        prompts = tokens_of(tokenizer, texts[0][start : start + CHUNK], special=True)
        completions = tokens_of(tokenizer, texts[1][start : start + CHUNK], special=False)
        for sample, (prompt, completion) in enumerate(zip(prompts, completions, strict=True), start):
            if not completion:
                found.skipped[sample] = "has a completion without tokens"
                continue
            tokens, labels = prompted(prompt, completion, end)
            found.add(sample, tokens, labels, f"no completion after truncation: the prompt has {len(prompt):,} tokens")
    return found.finish()
