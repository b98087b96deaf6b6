"""Causal language modelling: plain text in blocks, prompts with completions, or conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hwopt.config.job import Job
from hwopt.config.task_kinds import TaskFacts
from hwopt.data.bad_rows import BadRows, Places
from hwopt.data.chat_template import ChatTemplate, set_template
from hwopt.data.sources.chat import BadConversation, Conversation, chat_columns, prompt_column, read_conversations, read_prompts
from hwopt.data.sources.columns import PROMPTS, is_text, text_of
from hwopt.data.sources.rows import Rows
from hwopt.data.sources.tables import text_columns
from hwopt.data.stores.token_store import TokenStore, fingerprint, held_out_count, split_rows
from hwopt.data.tokenizer import LengthLimit
from hwopt.data.tokenizer_training import tokenizer_fingerprint
from hwopt.tasks.base import FORMAT, LossFunction, Metrics, Task
from hwopt.tasks.exactness import refuse_router
from hwopt.tasks.model_families import DECODER_FAMILY, ModelFamily
from hwopt.tasks.next_token import SampleArrays, encode_blocks, encode_prompts
from hwopt.tasks.prediction import Generation, Predictor, Trained
from hwopt.tasks.preparation import add_tokenless_rows, make_prepared, read_sources, tokenizer_for
from hwopt.tasks.prepared import IGNORED, Prepared
from hwopt.tasks.recognition import Recognised
from hwopt.tasks.spans import Shown, spans_of

if TYPE_CHECKING:
    import pyarrow as pa
    import torch
    from numpy.typing import NDArray
    from transformers import PretrainedConfig

COLUMN_KEYS = "data.text, data.messages, or data.prompt and data.completion"
"""What names the columns of a file, for a message about a file without them."""

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
        return _texts(rows, (data.prompt, str(data.completion)), "data.prompt and data.completion")
    known = data.messages is None and set(data.text) <= set(rows.table.column_names)
    if columns := () if known else chat_columns(rows.table.column_names, data.messages):
        found = read_conversations(rows, columns)
        usable = rows.usable()
        return Texts(rows.places, rows.bad_rows, [], [found[row] for row in range(len(found))]).take(usable)  # type: ignore[misc]
    return _texts(rows, data.text, COLUMN_KEYS)


def _texts(rows: Rows, names: Sequence[str], key: str) -> Texts:
    """The rows that have a text."""
    texts = text_columns(rows, names, key)
    return Texts(rows.places, rows.bad_rows, texts).take(rows.usable())


class CausalLM(Task):
    """Predict the next token."""

    facts = TaskFacts(
        "causal-lm",
        "AutoModelForCausalLM",
        target="next_token",
        decoder=True,
        adapter="CAUSAL_LM",
        keys=frozenset(
            f"data.{key}" for key in ("prompt", "completion", "messages", "chat_template", "assistant_turns", "sample_prompts")
        ),
    )
    default_metric: ClassVar[str] = "eval_loss"
    metric_directions: ClassVar[dict[str, bool]] = {"loss": False, "perplexity": False}
    pipeline_tag: ClassVar[str] = "text-generation"
    generates: ClassVar[bool] = True
    models: ClassVar[ModelFamily] = DECODER_FAMILY

    @classmethod
    def check_job(cls, job: Job) -> None:
        """Refuse two text columns."""
        if len(job.data.text) > 1:
            raise ValueError("data.text: causal-lm takes one column, or data.prompt and data.completion")

    @classmethod
    def recognise(cls, table: pa.Table, chosen: bool) -> Recognised | str:
        """Conversations, prompts with completions, or a text."""
        names = table.column_names
        if chat := chat_columns(names, None):
            if len(chat) == 1:
                return Recognised({"messages": chat[0]}, chat, f"column {chat[0]!r} holds conversations", 1, chat=True)
            if "text" not in names:
                why = "columns 'instruction' and 'output' hold conversations (Alpaca)"
                return Recognised({}, tuple(chat), why, 1, chat=True)
        for prompt, completion in PROMPTS:
            if is_text(table, prompt) and is_text(table, completion):
                why = f"columns {prompt!r} and {completion!r} are prompts with completions"
                return Recognised({"prompt": prompt, "completion": completion}, (prompt, completion), why, 1)
        if texts := text_of(table, None):
            why = f"column {texts[0]!r} holds text, and no column looks like a label"
            return Recognised({"text": texts[:1]}, tuple(texts[:1]), why, joined=True)
        return "no column holds text"

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
        template = ChatTemplate(tokenizer, job.data.assistant_turns)
        stores = [None if part is None else _store(part, template, limit, cache) for part in (train, held_out, test)]
        prepared = make_prepared(stores, tokenizer, None, avoid_used=False)
        if train.conversations is not None:
            prepared.notes.append(template.note)
        prepared.report_bad_rows(sources.train, sources.eval, sources.test)
        return prepared

    def read_inputs(self, rows: Rows, job: Job) -> list[Any]:
        """The prompt of each row, the text that is continued, or the conversation up to the answer."""
        data, known = job.data, rows.table.column_names
        if data.prompt is None and (data.messages is not None or not set(data.text) <= set(known)):
            column = prompt_column(known, data.messages)
            if column is not None:
                return read_prompts(rows, column)
        names, key = (data.text, COLUMN_KEYS) if data.prompt is None else ((data.prompt,), "data.prompt")
        (prompts,) = text_columns(rows, names, key)
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
        return _store(samples, ChatTemplate(trained.tokenizer, data.assistant_turns), limit, cache)

    def show(self, prepared: Prepared, row: Mapping[str, NDArray[Any]]) -> Shown:
        """The sample with the token after its last input, and the tokens that count in the loss."""
        labels = row["labels"].tolist()
        last = [] if labels[-1] == IGNORED else [labels[-1]]
        counted = [label != IGNORED for label in labels]
        spans = spans_of(prepared.tokenizer, [*row["input_ids"].tolist(), *last], [False, *counted])
        return Shown(spans, tokens_in_loss=sum(counted))

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


def _store(samples: Texts, template: ChatTemplate, limit: LengthLimit, cache: Path) -> TokenStore:
    """The token store of `samples`, from the cache or written now."""
    if samples.conversations is not None:
        return _chat_store(samples, samples.conversations, template, limit, cache)
    texts, tokenizer = samples.texts, template.tokenizer
    pairs = len(texts) == 2
    block = min(limit.max_length or BLOCK, limit.max_positions or BLOCK)
    settings = [FORMAT, CausalLM.facts.kind, pairs, limit.max_length if pairs else block]
    key = fingerprint(settings, tokenizer_fingerprint(tokenizer), *texts)

    def make() -> tuple[dict[str, Any], dict[str, Any]]:
        if pairs:
            arrays, found = encode_prompts(texts, tokenizer, limit, samples.places)
        else:
            arrays, found = encode_blocks(texts[0], tokenizer, block, samples.places.source)
        return arrays, {
            "kind": CausalLM.facts.kind,
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
    written = template.replaced or tokenizer.chat_template
    settings = [FORMAT, CausalLM.facts.kind, "conversations", limit.max_length, template.turns, written]
    key = fingerprint(settings, tokenizer_fingerprint(tokenizer), [conversation.key for conversation in conversations])

    def make() -> tuple[dict[str, Any], dict[str, Any]]:
        collected = SampleArrays(samples.places, limit, counts_last=True)
        for sample, conversation in enumerate(conversations):
            try:
                tokens, answer = template.encode(conversation)
            except BadConversation as error:
                collected.skipped[sample] = str(error)
                continue
            labels = [token if mask else IGNORED for token, mask in zip(tokens[1:], answer[1:], strict=True)]
            collected.add(sample, tokens[:-1], labels, "no answer after truncation")
        arrays, found = collected.finish()
        meta = {"kind": CausalLM.facts.kind, "label_names": None, "labels_per_token": True, "max_length": limit.max_length}
        return arrays, meta | found.meta(tokenizer)

    store = TokenStore.cached(cache / "tokens" / key, make)
    add_tokenless_rows(store, samples.places, samples.bad_rows)
    skipped = {sample for sample, _ in store.meta["left_out"]}
    limit.check(store.lengths, samples.places.take([sample for sample in range(len(samples)) if sample not in skipped]))
    return store
