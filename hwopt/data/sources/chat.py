"""Conversations: recognise the formats of chat data, and read their messages.

Four formats are recognised: `messages` of OpenAI ({"role", "content"}), `conversations` of ShareGPT ({"from", "value"}), the
columns `instruction`, `input` and `output` of Alpaca, and TRL's `prompt` and `completion` with a list of messages each. Lists of
messages and tools may be JSON text, as in csv files.
hwopt.data.chat_template turns them into tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hwopt.data.sources.column_types import without_nulls
from hwopt.text import first_line, listing, truncate

if TYPE_CHECKING:
    import pyarrow as pa

    from hwopt.data.sources.rows import Rows

Message = dict[str, Any]

ALPACA = ("instruction", "output")
MESSAGES_TEXT = r"""^\s*\[?\s*\{(?:\s*["'](?:role|from|content|value)["']|[^{}]*["'](?:role|from)["'])\s*:"""
"""How a message or a list of messages begins as JSON text, or as Python prints it."""
EXTRAS = ("input", "history", "tools", "functions", "system", "chat_template_kwargs")
"""Columns that are read beside those of the conversations."""

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
FORMER_ROLES = {"function": "tool"}
"""OpenAI's former name of a role -> its name."""
CALLS = "function_call"
"""The speaker of a tool call in ShareGPT's format, and the former key for one in OpenAI's."""
TRAIN_MARKS = ("weight", "train", "training", "loss")
"""Keys of a message that say whether it is trained: OpenAI's (0 or 1), those of axolotl, and that of ms-swift."""


class BadConversation(Exception):
    """A conversation that cannot be used. The message says why, without the place."""


class Arguments(dict[str, Any]):
    """The arguments of a tool call that the file has as JSON text."""

    def __init__(self, values: Mapping[str, Any], text: str) -> None:
        super().__init__(values)
        self.text = text

    def __reduce__(self) -> tuple[Any, ...]:  # copies keep the text
        return Arguments, (dict(self), self.text)


@dataclass(frozen=True)
class Conversation:
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    untrained: tuple[int, ...] = ()
    """Indices of answers that the data marks as not to be trained."""
    prompt: int = 0
    """So many messages are a prompt, and all text after them is trained, as in TRL; 0: each answer is trained."""
    switches: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the chat template, such as enable_thinking: the column chat_template_kwargs, as in TRL."""

    @property
    def answers(self) -> list[int]:
        """Indices of the messages to train."""
        assistant = [n for n, message in enumerate(self.messages) if message["role"] == "assistant" and n >= self.prompt]
        return [number for number in assistant if number not in self.untrained]

    @property
    def template_words(self) -> dict[str, Any]:
        """What the chat template reads beside the messages."""
        return {"tools": self.tools, **self.switches}

    @property
    def key(self) -> str:
        """A text that is equal for equal conversations."""
        calls = [call.get("function", call) for message in self.messages for call in message.get("tool_calls") or ()]
        texts = [text for call in calls if (text := getattr(call.get("arguments"), "text", None))]
        parts = [self.messages, self.tools, *filter(None, (self.untrained, self.prompt, self.switches, texts))]
        return json.dumps(parts, sort_keys=True, ensure_ascii=False)


def read_conversations(rows: Rows, columns: Sequence[str]) -> list[Conversation | None]:
    """The conversation of each row of the table. Rows that hold none are marked as bad, with None here."""
    return _read(rows, columns, lambda cells: conversation_of(cells, columns))


def read_prompts(rows: Rows, column: str) -> list[Conversation | None]:
    """The conversation of each row up to the answer to generate: without the assistant's last message.

    Rows that hold none are marked as bad, with None here.
    """
    return _read(rows, (column,), lambda cells: prompt_of(cells, column))


def _read(
    rows: Rows, columns: Sequence[str], conversation: Callable[[dict[str, Any]], Conversation]
) -> list[Conversation | None]:
    """What `conversation` returns for the cells of each row; None for rows that are bad, now or before."""
    from hwopt.data.sources.tables import find_column

    values = {name: values_of(find_column(rows.table, name, rows.source, "data.messages"), name, rows) for name in columns}
    extras = [name for name in EXTRAS if name in rows.table.column_names]
    values |= {name: values_of(rows.table[name], name, rows) for name in extras}
    found: list[Conversation | None] = []
    for row in range(rows.table.num_rows):
        found.append(None)
        if rows.places.numbers[row] in rows.bad_rows.reasons:
            continue
        try:
            found[row] = conversation({name: column[row] for name, column in values.items()})
        except BadConversation as error:
            rows.mark_bad(row, str(error))
    return found


def prompt_of(cells: Mapping[str, Any], column: str) -> Conversation:
    """The conversation up to the answer to generate. Raises BadConversation if nothing comes before it."""
    if column == ALPACA[0] and not is_messages(cells[column]):
        messages = alpaca_messages({**cells, "output": "-"}, ALPACA)[:-1]
        return Conversation(messages, switches=switches_of(cells))
    found = listed_messages(cells, column)
    messages = found.messages[:-1] if found.messages[-1]["role"] == "assistant" else found.messages
    if not messages:
        raise BadConversation("has no message before the assistant's")
    return Conversation(messages, found.tools, switches=found.switches)


def values_of(column: pa.ChunkedArray, name: str, rows: Rows) -> list[Any]:
    """The values of a column: those in the file, or those of the table without the nulls that Arrow adds to objects."""
    originals = rows.non_strings.get(name, {})
    return [originals[row] if row in originals else without_nulls(value) for row, value in enumerate(column.to_pylist())]


def conversation_of(cells: Mapping[str, Any], columns: Sequence[str]) -> Conversation:
    """The conversation in the cells of one row. Raises BadConversation."""
    if len(columns) == 2:
        if tuple(columns) == ALPACA and not is_messages(cells[columns[0]]):
            return Conversation(alpaca_messages(cells, columns), switches=switches_of(cells))
        return prompted_messages(cells, columns)
    found = listed_messages(cells, columns[0])
    if not any(message["role"] == "assistant" for message in found.messages):
        raise BadConversation("has no message of the assistant")
    if not found.answers:
        raise BadConversation("marks every message of the assistant as not to be trained")
    return found


def listed_messages(cells: Mapping[str, Any], column: str) -> Conversation:
    """The messages and tools in the cells of one row. Raises BadConversation."""
    value = cells[column]
    value = parsed(value, f"{column!r}") if isinstance(value, str) else value
    value = [value] if isinstance(value, dict) and {"role", "from"} & set(value) else value
    if not isinstance(value, list) or not value:
        raise BadConversation(f"{column!r} holds no list of messages: {truncate(value)}")
    messages = [message_of(one, number) for number, one in enumerate(value, 1)]
    if (system := cells.get("system")) and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": str(system)})
    untrained = [number for number, message in enumerate(messages) if not message.pop("weight", True)]
    return Conversation(messages, tools_of(cells), tuple(untrained), switches=switches_of(cells))


def is_messages(cell: Any) -> bool:
    """Whether a cell holds messages, or their text."""
    return isinstance(cell, list | dict) or (isinstance(cell, str) and re.match(MESSAGES_TEXT, cell) is not None)


def tools_of(cells: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The tools in the cells of one row, each of them an object or its JSON text; None without tools. Raises BadConversation."""
    tools = cells.get("tools") or cells.get("functions")
    tools = parsed(tools, "'tools'") if isinstance(tools, str) and tools.strip() else tools or None
    if not tools:
        return None
    found = [
        parsed(tool, "'tools'") if isinstance(tool, str) else tool for tool in (tools if isinstance(tools, list) else [tools])
    ]
    if bad := [tool for tool in found if not isinstance(tool, dict)]:
        raise BadConversation(f"'tools' holds a tool that is not an object: {truncate(bad[0])}")
    return [as_function(tool) for tool in found]


def switches_of(cells: Mapping[str, Any]) -> dict[str, Any]:
    """The variables of the chat template in the cells of one row. Raises BadConversation."""
    value = cells.get("chat_template_kwargs") or {}
    value = parsed(value, "'chat_template_kwargs'") if isinstance(value, str) else value
    if not isinstance(value, dict):
        raise BadConversation(f"'chat_template_kwargs' is not an object: {truncate(value)}")
    return given(value)


def prompted_messages(cells: Mapping[str, Any], columns: Sequence[str]) -> Conversation:
    """The conversation of a prompt and its completion, a list of messages each. Raises BadConversation."""
    prompt, completion = listed_messages(cells, columns[0]), listed_messages({columns[1]: cells[columns[1]]}, columns[1])
    if completion.messages[-1]["role"] != "assistant":
        raise BadConversation(f"the last message in {columns[1]!r} is not the assistant's")
    if completion.untrained:
        raise BadConversation(f"marks a message in {columns[1]!r} as not to be trained; move it to {columns[0]!r}")
    return replace(prompt, messages=[*prompt.messages, *completion.messages], prompt=len(prompt.messages))


def parsed(text: str, what: str) -> Any:
    """The JSON value in `text`. Raises BadConversation."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        if re.match(r"\s*\[?\s*\{\s*'", text):
            why = "is a list or an object as Python prints it, not JSON. Save the rows as jsonl, or the column with json.dumps"
            raise BadConversation(f"{what} {why}") from error
        raise BadConversation(f"{what} is not valid JSON: {first_line(error)}") from error


def message_of(value: Any, number: int) -> Message:
    """The message in OpenAI's or ShareGPT's format. `number` counts from 1. Raises BadConversation."""
    if not isinstance(value, dict):
        raise BadConversation(f"message {number} is not an object: {truncate(value)}")
    message = given(value)
    if "from" in message and "role" not in message:
        speaker = str(message.pop("from"))
        said = {"content": message.pop("value")} if "value" in message else {}
        if speaker == CALLS and isinstance(text := said.get("content"), str):
            said = {"content": "", "tool_calls": parsed(text, f"message {number}")}
        message = {"role": SHAREGPT_ROLES.get(speaker.lower(), speaker), **said, **message}
    if CALLS in message:
        message["tool_calls"] = message.pop(CALLS)
    calls = message.pop("tool_calls", None)
    if isinstance(calls, str):
        calls = parsed(calls, f"message {number}: tool_calls") if calls.strip() else None
    if calls:  # templates take an empty list for calls, and write no content
        message["tool_calls"] = [with_arguments(call, number) for call in (calls if isinstance(calls, list) else [calls])]
    role = message["role"] = FORMER_ROLES.get(str(message.get("role")), message.get("role"))
    if role not in ROLES:
        raise BadConversation(f"message {number} has the role {truncate(role)}; expected one of {', '.join(ROLES)}")
    content = message.get("content", None if "tool_calls" not in message else "")
    if content is None:
        keys = listing([repr(key) for key in message if key != "role"]) or "no other key"
        raise BadConversation(f"message {number} ({role}) has no 'content'; beside its role it has {keys}")
    if isinstance(content, list):  # parts, as in multimodal data
        if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            raise BadConversation(f"message {number} has parts that are not text; hwopt trains on text")
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str):
        raise BadConversation(f"message {number} has a content that is not text: {truncate(content)}")
    if not content.strip() and role == "user":
        raise BadConversation(f"message {number} ({role}) is empty")
    for name in TRAIN_MARKS:
        if name in message:
            message["weight"] = is_trained(message.pop(name), f"message {number}: {name}")
    return {**message, "content": content}


def as_function(described: Any) -> Any:
    """A tool, or a tool call, as templates expect it: {"type": "function", "function": …}. ShareGPT has the inner part alone."""
    plain = isinstance(described, dict) and "name" in described and "function" not in described and "type" not in described
    return {"type": "function", "function": described} if plain else described


def with_arguments(call: Any, number: int) -> Any:
    """A tool call whose arguments are an object: OpenAI's files have them as JSON text. Raises BadConversation."""
    if not isinstance(call, dict):
        raise BadConversation(f"message {number} has a tool call that is not an object: {truncate(call)}")
    call = as_function(given(call))
    inner = call.get("function", call)
    inner = given(inner) if isinstance(inner, dict) else inner
    if isinstance(inner, dict) and isinstance(text := inner.get("arguments"), str):
        arguments = parsed(text, f"message {number}: arguments") if text.strip() else {}
        inner = {**inner, "arguments": Arguments(arguments, text) if isinstance(arguments, dict) else text}
    return {**call, "function": inner} if "function" in call else inner


def with_json_arguments(message: Message) -> Message:
    """`message` with the arguments of its tool calls as JSON text: that of the file, if it has one."""

    def changed(call: dict[str, Any]) -> dict[str, Any]:
        if "function" in call:
            return {**call, "function": changed(call["function"])}
        arguments = call.get("arguments")
        text = arguments.text if isinstance(arguments, Arguments) else json.dumps(arguments, ensure_ascii=False)
        return {**call, "arguments": text} if isinstance(arguments, dict) else call

    return {**message, "tool_calls": list(map(changed, message["tool_calls"]))}


def given(value: Mapping[str, Any]) -> dict[str, Any]:
    """`value` without keys that are null themselves: OpenAI's files have null for what a message or a call lacks."""
    return {key: part for key, part in value.items() if part is not None}


def is_trained(mark: Any, what: str) -> bool:
    """Whether a message with this mark is trained. Raises BadConversation if the mark is not 0, 1, true or false."""
    if mark not in (0, 1):
        raise BadConversation(f"{what} is {truncate(mark)}; expected 0, 1, true or false")
    return bool(mark)


def alpaca_messages(cells: Mapping[str, Any], columns: Sequence[str]) -> list[Message]:
    """The messages of an Alpaca row, as LLaMA-Factory reads it: the turns of `history`, then the instruction with its input.

    Raises BadConversation.
    """
    instruction, output = (cells[name] for name in columns)
    for name, text in zip(columns, (instruction, output), strict=True):
        if not isinstance(text, str) or not text.strip():
            raise BadConversation(f"{name!r} has no text")
    more = cells.get("input")
    asked = f"{instruction}\n{more}" if isinstance(more, str) and more.strip() else instruction
    messages = [{"role": "system", "content": str(cells["system"])}] if cells.get("system") else []
    for question, answer in (*earlier_turns(cells.get("history")), (asked, output)):
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return messages


def earlier_turns(history: Any) -> list[tuple[str, str]]:
    """The (question, answer) pairs in an Alpaca row's `history`. Raises BadConversation."""
    turns = parsed(history, "'history'") if isinstance(history, str) and history.strip() else history or []
    if not isinstance(turns, list) or not all(
        isinstance(turn, list) and [type(text) for text in turn] == [str, str] for turn in turns
    ):
        raise BadConversation(f"'history' is not a list of [question, answer]: {truncate(history)}")
    return [(question, answer) for question, answer in turns]
