"""One message of a conversation, in the formats of OpenAI and ShareGPT, and its tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from hwopt.data.sources.rows import is_blank, parsed_json
from hwopt.text import first_line, listing, truncate

Message = dict[str, Any]

SHAREGPT_ROLES = {
    "system": "system",
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "assistant", "function_call"), "assistant"),
    **dict.fromkeys(("function_response", "observation", "tool"), "tool"),
}
"""The name of the speaker in ShareGPT's format -> role."""
ROLES = ("system", "developer", "user", "assistant", "tool")
FORMER_ROLES = {"function": "tool"}  # OpenAI's former name of a role -> its name
CALLS = "function_call"  # the speaker of a tool call in ShareGPT's format, and the former key for one in OpenAI's
AXOLOTL_MARKS = ("train", "training")  # axolotl trains a question with this mark; OpenAI and ms-swift mark answers alone
TRAIN_MARKS = ("weight", "loss", *AXOLOTL_MARKS)
"""Keys of a message that say whether it is trained: OpenAI's (0 or 1), that of ms-swift, and those of axolotl."""


class BadConversation(Exception):
    """A conversation that cannot be used. The message says why, without the place."""


class Arguments(dict[str, Any]):
    """The arguments of a tool call that the file has as JSON text."""

    def __init__(self, values: Mapping[str, Any], text: str) -> None:
        super().__init__(values)
        self.text = text

    def __reduce__(self) -> tuple[Any, ...]:  # copies keep the text
        return Arguments, (dict(self), self.text)


def parsed(text: str, what: str) -> Any:
    """The JSON value in `text`. Raises BadConversation."""
    try:
        return parsed_json(text)
    except ValueError as error:
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
        if other := [part for part in content if not (isinstance(part, dict) and part.get("type") == "text")]:
            raise BadConversation(f"message {number} has a part that is not text: {truncate(other[0])}; hwopt trains on text")
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str):
        raise BadConversation(f"message {number} has a content that is not text: {truncate(content)}")
    if is_blank(content) and role == "user":
        raise BadConversation(f"message {number} ({role}) is empty")
    if marked := {"train_detail", "training_detail"} & set(message):
        raise BadConversation(f"message {number} has {marked.pop()!r}, which trains parts of it; hwopt trains whole messages")
    for name in TRAIN_MARKS:
        if name in message:
            if (mark := message.pop(name)) not in (0, 1):
                raise BadConversation(f"message {number}: {name} is {truncate(mark)}; expected 0, 1, true or false")
            if mark and role != "assistant" and name in AXOLOTL_MARKS:
                raise BadConversation(f"message {number} ({role}) is marked with {name!r}; hwopt trains answers only")
            message["weight"] = bool(mark)
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
