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
from functools import partial
from typing import TYPE_CHECKING, Any

from hwopt.data.sources.messages import BadConversation, Message, as_function, given, message_of, parsed
from hwopt.data.sources.rows import is_blank, without_nulls
from hwopt.text import truncate

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

    from hwopt.data.sources.rows import Rows

Cells = Mapping[str, tuple["pa.ChunkedArray", Mapping[int, Any]]]
"""Name of a column -> it, and `Rows.non_strings` of it."""
CHUNK = 1_000  # rows whose cells are held as Python objects

ALPACA = ("instruction", "output")
MESSAGES_TEXT = r"""^\s*\[?\s*\{(?:\s*["'](?:role|from|content|value)["']|[^{}]*["'](?:role|from)["'])\s*:"""
"""How a message or a list of messages begins as JSON text, or as Python prints it."""
EXTRAS = ("tools", "functions", "system", "chat_template_kwargs")
"""Columns that are read beside those of the conversations."""
ALPACA_EXTRAS = ("input", "history")
"""Columns that are read beside those of Alpaca, too."""


@dataclass(frozen=True)
class Conversation:
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    untrained: tuple[int, ...] = ()  # indices of answers that the data marks as not to be trained
    prompt: int = 0  # so many messages are a prompt, and all text after them is trained, as in TRL; 0: each answer is trained
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


class Conversations(Sequence[Any]):
    """The conversation of each row, which is made when it is read: Python objects take ten times the memory of the texts."""

    def __init__(self, cells: Cells, build: Callable[[Mapping[str, Any]], Conversation], chosen: NDArray[np.int64]) -> None:
        """`build`: from the cells of a row. `chosen`: those of the rows that are meant, ascending, as CHUNK are read at once."""
        self.cells, self.build, self.chosen = cells, build, chosen
        self.start, self.chunk = -1, dict[str, list[Any]]()

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, at: Any) -> Any:
        """A Conversation, or the list of those of a slice. Raises BadConversation."""
        if isinstance(at, slice):
            return [self[number] for number in range(len(self))[at]]
        row = int(self.chosen[at])
        if (start := row - row % CHUNK) != self.start:
            self.start, self.chunk = start, {name: values_of(*each, start) for name, each in self.cells.items()}
        return self.build({name: values[row - start] for name, values in self.chunk.items()})

    def take(self, samples: Sequence[int] | NDArray[np.int64]) -> Conversations:
        import numpy as np

        return Conversations(self.cells, self.build, self.chosen[np.asarray(samples, np.int64)])


def read_conversations(rows: Rows, columns: Sequence[str], answers: bool = True) -> Conversations:
    """The conversation of each row; without `answers`, that in the only column up to the answer to generate.

    Rows that hold none are marked as bad.
    """
    import numpy as np

    from hwopt.data.sources.tables import find_column

    read = {name: find_column(rows.table, name, rows.source, "data.messages") for name in columns}
    read |= {name: rows.table[name] for name in (*EXTRAS, *ALPACA_EXTRAS) if name in rows.table.column_names}
    cells = {name: (column, rows.non_strings.get(name, {})) for name, column in read.items()}
    build = partial(conversation_of, columns=columns) if answers else partial(prompt_of, column=columns[0])
    found = Conversations(cells, build, np.arange(rows.table.num_rows))
    for row in range(len(found)):
        if rows.places.numbers[row] not in rows.bad_rows.reasons:
            try:
                found[row]
            except BadConversation as error:
                rows.mark_bad(row, str(error))
    return found


def prompt_of(cells: Mapping[str, Any], column: str) -> Conversation:
    """The conversation up to the answer to generate. Raises BadConversation if nothing comes before it."""
    if column == ALPACA[0] and not is_messages(cells[column]):
        messages = alpaca_messages({**cells, "output": "-"}, ALPACA)[:-1]
        return Conversation(messages, tools_of(cells), switches=switches_of(cells))
    found = listed_messages(cells, column)
    messages = found.messages[:-1] if found.messages[-1]["role"] == "assistant" else found.messages
    if not messages:
        raise BadConversation("has no message before the assistant's")
    return Conversation(messages, found.tools, switches=found.switches)


def values_of(column: pa.ChunkedArray, originals: Mapping[int, Any], start: int) -> list[Any]:
    """CHUNK values of a column: those in the file, or those of the table without the nulls that Arrow adds to objects."""
    found = enumerate(column.slice(start, CHUNK).to_pylist(), start)
    return [without_nulls(value) if (original := originals.get(row)) is None else original for row, value in found]


def conversation_of(cells: Mapping[str, Any], columns: Sequence[str]) -> Conversation:
    """The conversation in the cells of one row. Raises BadConversation."""
    if len(columns) == 2:
        if tuple(columns) == ALPACA and not is_messages(cells[columns[0]]):
            return Conversation(alpaca_messages(cells, columns), tools_of(cells), switches=switches_of(cells))
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
    marked = [number for number, message in enumerate(messages) if not message.pop("weight", True)]
    untrained = tuple(number for number in marked if messages[number]["role"] == "assistant")
    return Conversation(messages, tools_of(cells), untrained, switches=switches_of(cells))


def is_messages(cell: Any) -> bool:
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


def alpaca_messages(cells: Mapping[str, Any], columns: Sequence[str]) -> list[Message]:
    """The messages of an Alpaca row, as LLaMA-Factory reads it: the turns of `history`, then the instruction with its input.

    Raises BadConversation.
    """
    instruction, output = (cells[name] for name in columns)
    for name, text in zip(columns, (instruction, output), strict=True):
        if not isinstance(text, str) or is_blank(text):
            raise BadConversation(f"{name!r} has no text")
    more = cells.get("input")
    asked = f"{instruction}\n{more}" if isinstance(more, str) and not is_blank(more) else instruction
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
