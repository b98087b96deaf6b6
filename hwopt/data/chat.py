"""Conversations: recognise the formats of chat data, apply a chat template, and find the tokens of the assistant.

Three formats are recognised: `messages` of OpenAI ({"role", "content"}), `conversations` of ShareGPT ({"from", "value"}), and the
columns `instruction`, `input` and `output` of Alpaca. A chat template (Jinja, as in transformers) turns a conversation into text.
The assistant's tokens come from the template's `{% generation %}` markers, or from the spans by which the text grows with each
turn of the assistant; a template that rewrites earlier turns is refused for all turns but the last.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hwopt.errors import DataError, InputError
from hwopt.system.paths import read_regular_file
from hwopt.text import first_line, truncate

if TYPE_CHECKING:
    import pyarrow as pa

    from hwopt.data.rows import Rows

Turns = Literal["all", "last"]
Message = dict[str, Any]

SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "function_response": "tool",
    "observation": "tool",
    "tool": "tool",
}
"""The name of the speaker in ShareGPT's format -> role."""
ROLES = ("system", "developer", "user", "assistant", "tool")
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
MAX_TEMPLATE_BYTES = 1_000_000

CHATML = """{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' %}
{%- generation %}{{- message['content'] + '<|im_end|>' }}{%- endgeneration %}
{%- else %}
{{- message['content'] + '<|im_end|>' }}
{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
"""The template `data.chat_template = "chatml"`, as OpenAI published the format; without tools."""


class BadConversation(Exception):
    """A conversation that cannot be used. The message says why, without the place."""


@dataclass(frozen=True)
class Conversation:
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None

    @property
    def key(self) -> str:
        """A text that is equal for equal conversations."""
        return json.dumps([self.messages, self.tools], sort_keys=True, ensure_ascii=False)


def chat_columns(names: Sequence[str], column: str | None) -> tuple[str, ...]:
    """The columns that hold the conversations of a table with the columns `names`; empty if it has none.

    `column`: the one that the job names; None: the columns are recognised by their names.
    """
    if column is not None:
        return (column,)
    for name in ("messages", "conversations"):
        if name in names:
            return (name,)
    return ("instruction", "output") if {"instruction", "output"} <= set(names) else ()


def read_conversations(rows: Rows, columns: Sequence[str]) -> list[Conversation | None]:
    """The conversation of each row of the table. Rows that hold none are marked as bad, with None here."""
    from hwopt.data.tables import find_column

    table = rows.table
    values = {name: values_of(find_column(table, name, rows.source), name, rows) for name in columns}
    for extra in ("input", "system") if len(columns) == 2 else ("tools", "system"):
        if extra in table.column_names:
            values[extra] = values_of(table[extra], extra, rows)
    found: list[Conversation | None] = []
    bad = rows.bad_rows.reasons
    for row in range(table.num_rows):
        cells = {name: column[row] for name, column in values.items()}
        try:
            found.append(None if rows.places.numbers[row] in bad else conversation_of(cells, columns))
        except BadConversation as error:
            rows.mark_bad(row, str(error))
            found.append(None)
    return found


def prompt_column(names: Sequence[str], column: str | None) -> str | None:
    """The column from which `read_prompts` reads, of a table with the columns `names`; None if it has none.

    `column`: the one that the job names; None: the columns are recognised by their names.
    """
    known = ("messages", "conversations", "instruction") if column is None else (column,)
    return next((name for name in known if name in names), column)


def read_prompts(rows: Rows, column: str) -> list[Conversation | None]:
    """The conversation of each row up to the answer to generate: without the assistant's last message.

    Rows that hold none are marked as bad, with None here.
    """
    from hwopt.data.tables import find_column

    values = {column: values_of(find_column(rows.table, column, rows.source), column, rows)}
    for extra in ("input", "tools", "system"):
        if extra in rows.table.column_names:
            values[extra] = values_of(rows.table[extra], extra, rows)
    found: list[Conversation | None] = []
    for row in range(rows.table.num_rows):
        try:
            found.append(prompt_of({name: cells[row] for name, cells in values.items()}, column))
        except BadConversation as error:
            rows.mark_bad(row, str(error))
            found.append(None)
    return found


def prompt_of(cells: Mapping[str, Any], column: str) -> Conversation:
    """The conversation up to the answer to generate. Raises BadConversation if nothing comes before it."""
    if column == "instruction":
        return Conversation(alpaca_messages({**cells, "output": "-"}, ("instruction", "output"))[:-1])
    found = listed_messages(cells, column)
    messages = found.messages[:-1] if found.messages[-1]["role"] == "assistant" else found.messages
    if not messages:
        raise BadConversation("has no message before the assistant's")
    return Conversation(messages, found.tools)


def values_of(column: pa.ChunkedArray, name: str, rows: Rows) -> list[Any]:
    """The values of a column, also of one with mixed types, which the table stores as text."""
    mixed = rows.non_strings.get(name, {})
    return [mixed.get(row, value) for row, value in enumerate(column.to_pylist())]


def conversation_of(cells: Mapping[str, Any], columns: Sequence[str]) -> Conversation:
    """The conversation in the cells of one row. Raises BadConversation."""
    if len(columns) == 2:
        return Conversation(alpaca_messages(cells, columns))
    found = listed_messages(cells, columns[0])
    if not any(message["role"] == "assistant" for message in found.messages):
        raise BadConversation("has no message of the assistant")
    return found


def listed_messages(cells: Mapping[str, Any], column: str) -> Conversation:
    """The messages and tools in the cells of one row. Raises BadConversation."""
    value, tools = cells[column], cells.get("tools")
    value = parsed(value, f"{column!r}") if isinstance(value, str) else value
    tools = parsed(tools, "'tools'") if isinstance(tools, str) and tools.strip() else tools or None
    if not isinstance(value, list) or not value:
        raise BadConversation(f"{column!r} holds no list of messages: {truncate(value)}")
    messages = [message_of(one, number) for number, one in enumerate(value, 1)]
    if (system := cells.get("system")) and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": str(system)})
    return Conversation(messages, [without_nulls(tool) for tool in tools] if tools else None)


def parsed(text: str, what: str) -> Any:
    """The JSON value in `text`. Raises BadConversation."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadConversation(f"{what} is not valid JSON: {first_line(error)}") from error


def message_of(value: Any, number: int) -> Message:
    """The message in OpenAI's or ShareGPT's format. `number` counts from 1. Raises BadConversation."""
    if not isinstance(value, dict):
        raise BadConversation(f"message {number} is not an object: {truncate(value)}")
    message = without_nulls(value)
    if "from" in message and "role" not in message:
        speaker = str(message.pop("from"))
        message = {"role": SHAREGPT_ROLES.get(speaker.lower(), speaker), "content": message.pop("value", ""), **message}
    role = message.get("role")
    if role not in ROLES:
        raise BadConversation(f"message {number} has the role {truncate(role)}; expected one of {', '.join(ROLES)}")
    content = message.get("content", "")
    if isinstance(content, list):  # parts, as in multimodal data
        if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            raise BadConversation(f"message {number} has parts that are not text; hwopt trains on text")
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str):
        raise BadConversation(f"message {number} has a content that is not text: {truncate(content)}")
    if not content.strip() and role in ("user", "assistant") and not message.get("tool_calls"):
        raise BadConversation(f"message {number} ({role}) is empty")
    return {**message, "content": content}


def without_nulls(value: Any) -> Any:
    """`value` without keys that are null: a column of objects has every key of all rows."""
    if isinstance(value, dict):
        return {key: without_nulls(part) for key, part in value.items() if part is not None}
    return [without_nulls(part) for part in value] if isinstance(value, list) else value


def alpaca_messages(cells: Mapping[str, Any], columns: Sequence[str]) -> list[Message]:
    """The messages of an Alpaca row: instruction, and input if there is one, as the user's turn."""
    instruction, output = (cells[name] for name in columns)
    for name, text in zip(columns, (instruction, output), strict=True):
        if not isinstance(text, str) or not text.strip():
            raise BadConversation(f"{name!r} has no text")
    more = cells.get("input")
    content = f"{instruction}\n\n{more}" if isinstance(more, str) and more.strip() else instruction
    system = [{"role": "system", "content": str(cells["system"])}] if cells.get("system") else []
    return [*system, {"role": "user", "content": content}, {"role": "assistant", "content": output}]


def set_template(tokenizer: Any, given: str | None) -> None:
    """Give `tokenizer` the chat template of the job: "chatml", a file, or None for its own.

    Raises InputError if there is none, or if the file cannot be read.
    """
    if given == "chatml":
        tokenizer.chat_template = CHATML
    elif given is not None:
        try:
            tokenizer.chat_template = read_regular_file(Path(given), MAX_TEMPLATE_BYTES).decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"data.chat_template: {given} is not UTF-8") from error
    if not tokenizer.chat_template:
        raise InputError(
            "data.chat_template: the tokenizer has no chat template. Give a Jinja file, "
            '"chatml", or the tokenizer of a chat model (model.tokenizer)'
        )


def common_length(one: str, other: str) -> int:
    """The length of the longest common start of two texts."""
    return next((place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@dataclass(frozen=True)
class ChatTemplate:
    """The chat template of a tokenizer."""

    tokenizer: Any
    turns: Turns
    """Which turns of the assistant are trained on."""

    def encode(self, conversation: Conversation) -> tuple[list[int], list[bool]]:
        """(tokens, whether each is one of the assistant). Raises BadConversation if the template refuses the conversation."""
        text, spans = self.render(conversation)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        offsets = encoded["offset_mapping"]
        mask = [any(start < end and first <= start and end <= last for first, last in spans) for start, end in offsets]
        return encoded["input_ids"], mask

    def render(self, conversation: Conversation) -> tuple[str, list[tuple[int, int]]]:
        """(text, spans of the assistant's turns in characters)."""
        messages, tools = conversation.messages, conversation.tools
        answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if self.turns == "last":
            answers, messages = answers[-1:], messages[: answers[-1] + 1]  # what follows the last answer is not trained on
        marked = GENERATION.search(str(self.tokenizer.chat_template))
        text, spans = self.marked(messages, tools) if marked else self.grown(messages, tools, answers)
        if marked and self.turns == "last":
            before = common_length(text, self.text(messages[:-1], tools))
            spans = [(start, end) for start, end in spans if start >= before]
        if not spans:
            raise BadConversation("the chat template renders no turn of the assistant")
        return text, spans

    def marked(self, messages: list[Message], tools: Any) -> tuple[str, list[tuple[int, int]]]:
        """By the template's own markers."""
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            rendered: Any = render_jinja_template(
                [messages],
                tools=tools,
                chat_template=self.tokenizer.get_chat_template(tools=tools),
                return_assistant_tokens_mask=True,
                **self.tokenizer.special_tokens_map,
            )
        except Exception as error:  # jinja, and `raise_exception` of templates
            raise BadConversation(f"the chat template refuses it: {first_line(error)}") from error
        (text,), (spans,) = rendered
        return text, [(start, end) for start, end in spans if end > start]

    def grown(self, messages: list[Message], tools: Any, answers: Sequence[int]) -> tuple[str, list[tuple[int, int]]]:
        """By the text that each answer adds to the text before it.

        That text ends with the generation prompt, or without one if answers in a conversation do not begin with it.
        """
        whole, spans = self.text(messages, tools), []
        for number in answers:
            prompts = (self.text(messages[:number], tools, add_generation_prompt=added) for added in (True, False))
            before = next((len(prompt) for prompt in prompts if whole.startswith(prompt)), len(whole))
            after = whole if number == len(messages) - 1 else self.text(messages[: number + 1], tools)
            end = common_length(after, whole)  # a template may end a conversation with a token of its own
            if messages[number]["content"].strip() not in whole[before:end]:
                raise DataError(
                    "data.assistant_turns: the chat template rewrites earlier turns, so hwopt cannot find the answers in the "
                    "text. Set data.assistant_turns = 'last', or give a template with {% generation %} markers "
                    "(data.chat_template)"
                )
            spans.append((before, end))
        return whole, spans

    def text(self, messages: list[Message], tools: Any, add_generation_prompt: bool = False) -> str:
        """The text of `messages`. Raises BadConversation."""
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
                )
            )
        except Exception as error:  # jinja, and `raise_exception` of templates
            raise BadConversation(f"the chat template refuses it: {first_line(error)}") from error
