"""Causal language modelling: plain text in blocks, prompts with completions, or conversations."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hwopt.config.job import Job
from hwopt.config.task_kinds import TaskFacts
from hwopt.data.answer_checks import advice, joined_without_blank, split_markers
from hwopt.data.chat_template import ChatTemplate, set_eos_token, set_template
from hwopt.data.chatml import add_chatml_tokens
from hwopt.data.sources.chat import ALPACA, read_conversations
from hwopt.data.sources.columns import COLUMN_KEYS, LONG_TEXT, holds_messages, mean_length, text_of, unusable
from hwopt.data.sources.layout import Layout, layout_of, recognised, with_beside
from hwopt.data.sources.messages import BadConversation
from hwopt.data.sources.rows import Rows
from hwopt.data.sources.tables import text_columns
from hwopt.data.stores.chunks import Chunks
from hwopt.data.stores.token_store import TokenStore, held_out_count
from hwopt.data.tokenizer import Encoding, LengthLimit
from hwopt.errors import DataError
from hwopt.tasks.base import Task
from hwopt.tasks.generators import Generation, TextGenerator
from hwopt.tasks.model_families import DECODER_FAMILY, ModelFamily
from hwopt.tasks.next_token import SampleArrays, encode_blocks, encode_prompts, encode_texts, token_loss
from hwopt.tasks.predictors import TextPredictor
from hwopt.tasks.preparation import token_store
from hwopt.tasks.prepared import IGNORED, ChatTokens, Prepared, Samples, Trained
from hwopt.tasks.preview import Shown, spans_of
from hwopt.tasks.recognition import Recognised
from hwopt.text import listing

if TYPE_CHECKING:
    import pyarrow as pa
    import torch
    from numpy.typing import NDArray

    from hwopt.tasks.metrics import LossMetrics

KEYS = ("prompt", "completion", "messages", "blocks", "chat_template", "eos_token", "assistant_turns", "sample_prompts")
"""Keys of [data] that only this and some other tasks read."""
BLOCK = 1_024  # tokens per block of plain text, unless the job or the model has a smaller limit


class CausalLM(Task):
    """Predict the next token."""

    facts = TaskFacts(
        "causal-lm",
        "AutoModelForCausalLM",
        target="next_token",
        decoder=True,
        adapter="CAUSAL_LM",
        keys=frozenset(f"data.{key}" for key in KEYS),
    )
    default_metric: ClassVar[str] = "eval_loss"
    metric_directions: ClassVar[dict[str, bool]] = {"loss": False, "perplexity": False}
    pipeline_tag: ClassVar[str] = "text-generation"
    generates: ClassVar[bool] = True
    models: ClassVar[ModelFamily] = DECODER_FAMILY

    @classmethod
    def check_job(cls, job: Job) -> None:
        if len(job.data.text) > 1:
            raise ValueError("data.text: causal-lm takes one column, or data.prompt and data.completion")

    @classmethod
    def recognise(cls, table: pa.Table, chosen: bool) -> Recognised | str:
        """Conversations, prompts with completions, or a text."""
        names = table.column_names
        if reason := unusable(table):
            return reason
        found = [*recognised(table)]
        if "input" in names:  # a text beside Alpaca's columns has both, and the prompt would be trained too
            found.sort(key=lambda each: each.columns != ALPACA)
        if not found or found[0].kind == "texts":  # the column with the messages, or the text, has another name
            found = [Layout("messages", (name,)) for name in names if holds_messages(table, name)]
        if found:
            first, others = found[0], tuple(found[1:])
            return recognised_samples(with_beside(replace(first, unread=others), names), table)
        if texts := text_of(table, None):
            beside = with_beside(Layout("texts", (texts[0],)), names)
            why = f"column {texts[0]!r} holds text, and no column looks like a label"
            why += f"; {beside.note}, or to predict a column set task.kind and data.label" if beside.beside else ""
            if table.num_rows > 1 and mean_length(table, texts[0]) < LONG_TEXT:
                return Recognised({"text": texts[:1]}, tuple(texts[:1]), why)
            return Recognised({"text": texts[:1], "blocks": True}, tuple(texts[:1]), f"{why}; it is cut into blocks", joined=True)
        return "no column holds text"

    def samples(self, rows: Rows, job: Job) -> Samples:
        """Prompts with completions, texts, or conversations, as the job says or as the columns are named."""
        try:
            layout = layout_of(rows.table, job.data)
        except DataError as error:
            raise DataError(f"{rows.source}: {error}") from error
        if layout.chat:
            columns: Sequence[Sequence[Any]] = [read_conversations(rows, layout.columns)]
        else:
            key = COLUMN_KEYS if layout.kind == "texts" else "data.prompt and data.completion"
            columns = text_columns(rows, layout.columns, key)
        return replace(Samples.of(rows, columns), note=layout.note)

    def split(self, samples: Samples, fraction: float, seed: int) -> tuple[Samples, Samples]:
        """(training, evaluation) samples; of a single document the end is held out."""
        if len(samples) > 1 or len(samples.columns) > 1 or samples.is_chat:
            return super().split(samples, fraction, seed)
        text = samples.columns[0][0]
        at = len(text) - held_out_count(len(text), fraction, samples.places.source)
        return replace(samples, columns=[[text[:at]]]), replace(samples, columns=[[text[at:]]])

    def plain_texts(self, samples: Samples) -> list[str]:
        if not samples.is_chat:
            return super().plain_texts(samples)
        texts = [str(message["content"]) for conversation in samples.columns[0] for message in conversation.messages]
        called = [message["tool_calls"] for chat in samples.columns[0] for message in chat.messages if "tool_calls" in message]
        tools = [chat.tools for chat in samples.columns[0] if chat.tools]
        return texts + [json.dumps(part, ensure_ascii=False) for part in (*called, *tools)]

    def fit_tokenizer(self, tokenizer: Any, job: Job, chat: bool) -> ChatTokens:
        """Set the end-of-text token of the job, and for conversations its chat template with the tokens of that."""
        if job.data.eos_token is not None:
            set_eos_token(tokenizer, job.data.eos_token)
        if not chat:
            return ChatTokens(ends=() if job.data.eos_token is None else (tokenizer.eos_token_id,))
        set_template(tokenizer, job.data.chat_template)
        new = add_chatml_tokens(tokenizer) if job.data.chat_template == "chatml" else ()
        end = ChatTemplate(tokenizer, job.data.assistant_turns).end_token()
        return ChatTokens(new, () if end is None else (end,), chat=True)

    def store(self, samples: Samples, trained: Trained, cache: Path, seed: int | None = None) -> TokenStore:
        """Texts: a row and the end-of-text token. Blocks: documents, joined by the end-of-text token and cut.

        Prompts: only the completion and the end-of-text token are predicted. Conversations: only the tokens of the assistant.
        """
        texts, tokenizer, limit, places = samples.columns, trained.tokenizer, trained.limit, samples.places
        blocks = trained.job.data.blocks
        settings: list[Any]
        content: Iterable[Iterable[Any]] = texts
        encode: Callable[[Chunks], Encoding]
        if samples.is_chat:
            template = template_of(trained)
            settings = ["conversations", limit.max_length, template.turns, template.replaced, tokenizer.chat_template]
            content = [(conversation.key for conversation in texts[0])]
            encode = partial(encode_chat, samples, template, limit)
        elif len(texts) == 2:
            settings = ["prompts", limit.max_length]
            encode = partial(encode_prompts, texts, tokenizer, limit, places)
        elif samples.documents if blocks is None else blocks:
            block = min(limit.max_length or BLOCK, limit.max_positions or BLOCK)
            settings = ["blocks", block]
            encode = partial(encode_blocks, texts[0], tokenizer, block, places.source)
        else:
            settings = ["texts", limit.max_length]
            encode = partial(encode_texts, texts[0], tokenizer, limit, places)
        return token_store(TokenStore, samples, trained, cache, [self.kind, *settings], content, encode)

    def notes(self, parts: Mapping[str, Samples], trained: Trained, prepared: Prepared) -> list[str]:
        """How the answers of conversations are found and end, and which tokens are new."""
        note = [parts["train"].note] if parts["train"].note else []
        prepared.warnings.extend(other_kinds(parts))
        if not parts["train"].is_chat:
            if split := split_markers(parts["train"].columns[0], trained.tokenizer):
                prepared.warnings.append(
                    f"the texts have {split[0]}, which this tokenizer splits into several tokens, so that an answer does not end "
                    'there. Give conversations as messages with data.chat_template = "chatml", which adds its tokens, or a '
                    "model.tokenizer that has them"
                )
            columns = parts["train"].columns
            if len(columns) == 2 and (joined := joined_without_blank(*columns)):
                prepared.warnings.append(
                    f"nothing separates the prompts from their completions: {joined!r}. End the prompts with a line break, begin "
                    "the completions with a blank, or give both as messages, for which the chat template separates them"
                )
            return note
        prepared.warnings.extend(unwritten_parts(parts, prepared))
        names = trained.tokenizer.convert_ids_to_tokens
        prompted = parts["train"].columns[0][0].prompt
        found = [
            *note,
            "chat template: all text after each prompt is trained"
            if prompted
            else template_of(trained).note(trained.job.data.chat_template),
        ]
        if days := {day for store in prepared.stores if (day := store.meta.get("day"))}:
            found.append(
                f"chat template: writes the date; the tokens, also those of the cache, keep that of {listing(sorted(days))}"
            )
        if prepared.chat_tokens.new:
            listed = ", ".join(names(prepared.chat_tokens.new))
            found.append(f"tokenizer: {listed} added; the model gets new embeddings for them, which are trained")
        if prepared.chat_tokens.ends:
            found.append(f"answers end with {names(prepared.chat_tokens.ends)[0]}, which stops generation (generation_config)")
        else:
            prepared.warnings.append(
                "data.chat_template: no special token ends an answer, so generation does not stop there. "
                "End answers with a special token of the tokenizer in the template"
            )
        return found

    def read_inputs(self, rows: Rows, job: Job) -> Sequence[Any]:
        """The prompt of each row, the text that is continued, or the conversation up to the answer."""
        layout = layout_of(rows.table, job.data, answers=False)
        if layout.chat:
            return read_conversations(rows, layout.columns[:1], answers=False)
        key = COLUMN_KEYS if layout.kind == "texts" else "data.prompt"
        (prompts,) = text_columns(rows, layout.columns[:1], key)
        return prompts

    def predictor(self, trained: Trained, model: Any, generation: Generation) -> TextPredictor:
        return TextGenerator(trained, model, generation)

    def show(self, prepared: Prepared, row: Mapping[str, NDArray[Any]]) -> Shown:
        """The sample with the token after its last input, and the tokens that count in the loss."""
        labels = row["labels"].tolist()
        last = [] if labels[-1] == IGNORED else [labels[-1]]
        counted = [label != IGNORED for label in labels]
        spans = spans_of(prepared.tokenizer, [*row["input_ids"].tolist(), *last], [False, *counted])
        return Shown(spans, tokens_in_loss=sum(counted))

    def loss(self, outputs: Any, targets: torch.Tensor, smoothing: float = 0.0) -> tuple[torch.Tensor, int | torch.Tensor]:
        """(cross-entropy summed over the labels that are not -100, their number); targets (batch, length), already shifted."""
        return token_loss(outputs, targets, smoothing=smoothing)

    def metrics(self, prepared: Prepared, device: torch.device | str) -> LossMetrics:
        from hwopt.tasks.metrics import TokenMetrics

        return TokenMetrics(device)


def recognised_samples(layout: Layout, table: pa.Table) -> Recognised:
    """The columns of `layout`, conversations or prompts with completions, for a job."""
    columns = layout.columns
    what = {"completions": "prompts with completions, as messages", "prompts": "prompts with completions"}
    kind = "conversations (Alpaca)" if columns == ALPACA else what.get(layout.kind, "conversations")
    why = f"column{'s' * (len(columns) > 1)} {listing(list(map(repr, columns)))} hold{'s' * (len(columns) < 2)} {kind}"
    keys = {"messages": columns[0]} if layout.kind == "messages" else {"prompt": columns[0], "completion": columns[1]}
    alone = columns == ALPACA and not layout.unread
    answers = columns[0] == ALPACA[0] or holds_messages(table, columns[0])  # a label beside them says what they are about
    why = "; ".join(filter(None, (why, layout.note)))
    return Recognised({} if alone else keys, columns, why, 5 if answers else 1, chat=layout.chat)


def template_of(trained: Trained) -> ChatTemplate:
    """The chat template of the tokenizer, else that of the job."""
    if not trained.tokenizer.chat_template:
        set_template(trained.tokenizer, trained.job.data.chat_template)
    return ChatTemplate(trained.tokenizer, trained.job.data.assistant_turns)


def encode_chat(samples: Samples, template: ChatTemplate, limit: LengthLimit, chunks: Chunks) -> Encoding:
    today = str(date.today()) if template.writes_date else None
    if chunks.state.get("day", today) != today:  # all conversations have one date
        chunks.clear()
    chunks.state["day"] = today
    found = SampleArrays(samples.places, limit, chunks)
    unwritten: dict[str, list[int]] = found.state.setdefault("unwritten", {})
    for sample in range(chunks.done, len(samples)):
        conversation = samples.columns[0][sample]
        try:
            tokens, answer = template.encode(conversation)
        except BadConversation as error:
            found.skip(sample, str(error))
            continue
        for kind in template.left_out(conversation):
            unwritten.setdefault(kind, [0, sample])[0] += 1
        labels = [token if mask else IGNORED for token, mask in zip(tokens[1:], answer[1:], strict=True)]
        found.add_shifted(sample, tokens[:-1], labels, "no answer after truncation")
    return found.encoding(unwritten=unwritten, day=today)


def other_kinds(parts: Mapping[str, Samples]) -> list[str]:
    """A line for each part whose samples are of another kind than those of training."""
    kinds = {part: (len(samples.columns), samples.is_chat) for part, samples in parts.items()}
    words = {(1, True): "conversations", (1, False): "texts", (2, False): "prompts with completions"}
    return [
        f"{parts[part].places.source} holds {words[kind]}, and the training data {words[kinds['train']]}: their losses do not "
        f"compare. Name the columns that both have ({COLUMN_KEYS})"
        for part, kind in kinds.items()
        if kind != kinds["train"]
    ]


def unwritten_parts(parts: Mapping[str, Samples], prepared: Prepared) -> list[str]:
    """A line for each kind of parts of conversations that the chat template leaves out."""
    total = sum(map(len, parts.values()))
    counts: dict[str, list[Any]] = {}
    for part, store in prepared.parts.items():
        for kind, (count, first) in store.meta.get("unwritten", {}).items():
            counts.setdefault(kind, [0, parts[part].places.at(first)])[0] += count
    return [
        f"the chat template does not write the {kind} of {count:,} of {total:,} conversations, the first one at {place}: the "
        f"model does not see them. {advice(kind)}"
        for kind, (count, place) in counts.items()
    ]
