"""Find what a chat template leaves out of a conversation: messages of a role, tools, calls, thoughts, content beside a call.

The model never sees such parts, and the loss still looks healthy. Each part gets a mark, and the conversation is rendered once
more: a part whose mark does not appear is left out. Questions and answers have none.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hwopt.data.sources.messages import BadConversation, Message, with_json_arguments

THOUGHT_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message with the thoughts before its content, in the order in which transformers takes them."""
KNOWN_KEYS = ("role", "content", "name", "id", "tool_call_id", *THOUGHT_KEYS)
"""Keys of a message that are parts of their own, or that many templates leave out because they do not need them."""
THOUGHTS_IN_CONTENT = "thoughts before </think> in the content"
BESIDE_CALLS = "content beside tool calls"
CALLS = "tool calls"
"""Conversations whose answers lack these are refused. The name of a function alone does not tell: "f" is in <end_of_turn>."""
Written = tuple[str, list[tuple[int, int]]]  # (text of messages, spans of the answers in it as far as markers say them)
SHORT: list[Message] = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "qzx", "arguments": {"qzy": "qzz"}}}


def left_out(
    render: Callable[[list[Message], Mapping[str, Any]], str],
    messages: list[Message],
    answers: Sequence[int],
    words: Mapping[str, Any],
) -> list[str]:
    """The kinds of parts of `messages` and `words` that `render` does not write.

    `answers`: indices of the messages whose thoughts and content beside calls count.
    """
    if next(parts(messages, words, answers), None) is None:
        return []
    messages, words = copy.deepcopy((messages, dict(words)))
    marks: dict[str, str] = {}
    for number, (kind, holder, key, part) in enumerate(list(parts(messages, words, answers))):
        marks[mark := f"qzx{number}qzx"] = kind
        holder[key] = holder[key].replace(part, part + mark, 1)
    try:
        marked = render(messages, words)
    except BadConversation:  # the template checks the part
        return []
    return list(dict.fromkeys(kind for mark, kind in marks.items() if mark not in marked))


def parts(
    messages: list[Message], words: Mapping[str, Any], answers: Sequence[int]
) -> Iterator[tuple[str, dict[str, Any], str, str]]:
    """(kind, object that holds the part, its key, the text of the part) of each part that a template may leave out."""
    for tool in words.get("tools") or ():
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if isinstance(function, dict) and isinstance(name := function.get("name"), str):
            yield "tools", function, "name", name
    for number, message in enumerate(messages):
        content = message["content"].strip()
        for key, text in message.items():
            if key not in KNOWN_KEYS and isinstance(text, str) and text.strip():
                yield f"{key!r} in messages", message, key, text.strip()
        if message["role"] != "assistant":
            if content and message["role"] != "user":
                yield f"{message['role']} messages", message, "content", content
            continue
        if number not in answers:
            continue
        for call in message.get("tool_calls") or ():
            function = call.get("function", call)
            if isinstance(name := function.get("name"), str):
                yield CALLS, function, "name", name
        for key in THOUGHT_KEYS:
            if isinstance(thought := message.get(key), str) and thought.strip():
                yield key, message, key, thought.strip()
        thoughts, closed, _ = content.rpartition("</think>")
        if thoughts := thoughts.rpartition("<think>")[2].strip():
            yield THOUGHTS_IN_CONTENT, message, "content", thoughts
        elif content and not closed and message.get("tool_calls"):
            yield BESIDE_CALLS, message, "content", content


def advice(kind: str) -> str:
    """What to do about a kind of parts that a template leaves out."""
    if kind == "developer messages":
        return "Give them the role system, or give a template that writes them (data.chat_template)"
    return "Remove them from the data, or give a template that writes them (data.chat_template)"


def takes_json(write: Callable[[list[Message], Mapping[str, Any]], Written]) -> bool:
    """Whether the template with which `write` writes joins the arguments of a tool call to a text, as DeepSeek's.

    It needs their JSON text then. Of an object, jinja makes an error, or the template writes what Python prints.
    """
    described = {"name": "qzx", "description": "-", "parameters": {"type": "object", "properties": {}}}
    words = {"tools": [{"type": "function", "function": described}]}
    answer: Message = {"role": "assistant", "content": "", "tool_calls": [CALL]}

    def fits(answer: Message) -> bool:
        try:
            text = write([SHORT[0], answer], words)[0]
        except Exception:  # jinja, and `raise_exception` of templates
            return False
        return "qzz" in text and "'qzy'" not in text and '\\"' not in text

    return not fits(answer) and fits(with_json_arguments(answer))
