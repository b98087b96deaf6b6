"""Check what a chat template writes of a conversation, and that it trains each answer with its content, its calls and its end.

Without these checks a template can train something else, and the loss still looks healthy: a call that is never trained, an
answer that never ends, a part that the model never sees. To find parts that a template leaves out, each gets a mark, and the
conversation is rendered once more: a part whose mark does not appear is left out. Questions and answers have none.
"""

from __future__ import annotations

import copy
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hwopt.data.sources.messages import BadConversation, Message, with_json_arguments
from hwopt.text import first_line


def common_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """The length of the longest common start of two texts, or of two lists of tokens."""
    least = min(len(one), len(other))
    if one[:least] == other[:least]:
        return least
    return bisect_left(range(least), True, key=lambda place: one[: place + 1] != other[: place + 1])


def connected(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The spans in their order, those that touch joined, without empty ones."""
    found: list[tuple[int, int]] = []
    for start, end in spans:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], end)
        elif end > start:
            found.append((start, end))
    return found


def without(spans: Sequence[tuple[int, int]], cut: Sequence[int]) -> list[tuple[int, int]]:
    """The spans without what lies in `cut`."""
    parts = [part for start, end in spans for part in ((start, min(end, cut[0])), (max(start, cut[1]), end))]
    return [(start, end) for start, end in parts if end > start]


MARKER = re.compile(r"<\|[a-z_]{2,30}\|>|<(?:start|end)_of_turn>")
"""What chat templates write around a turn: <|im_end|>, <|eot_id|>, <end_of_turn>."""


def split_markers(texts: Sequence[str], tokenizer: Any) -> list[str]:
    """The markers of chat templates in the first 100 `texts` that are not one token of `tokenizer`."""
    found = dict.fromkeys(marker for text in texts[:100] for marker in MARKER.findall(text))
    return [marker for marker in found if len(tokenizer(marker, add_special_tokens=False)["input_ids"]) != 1]


JOINED = re.compile(r"[a-zA-Z0-9.?!]\n[a-zA-Z0-9]")
"""The last letter of a prompt and the first one of its completion, without a blank."""


def joined_without_blank(prompts: Sequence[str], completions: Sequence[str]) -> str | None:
    """The end of a prompt with the begin of its completion, if most of the first 100 have nothing between them."""
    ends = [prompt[-1:] + "\n" + completion[:1] for prompt, completion in zip(prompts[:100], completions[:100], strict=True)]
    found = [number for number, end in enumerate(ends) if JOINED.fullmatch(end)]
    return prompts[found[0]][-12:] + completions[found[0]][:12] if 2 * len(found) > len(ends) else None


def is_closed(text: str, content: str) -> bool:
    """Whether `text`, the answer `content` as a template writes it, has an end behind the content."""
    written = text.rstrip()
    return bool(written) and not (content and written.endswith(content))


def spoken(message: Message) -> str:
    """The content of a message without the thoughts before it, which templates may leave out or write in another form."""
    return str(message["content"]).rpartition("</think>")[2].strip()


def check_answer(text: str, message: Message, number: int, whole: str) -> None:
    """Raise BadConversation unless `text`, the part of `whole` found for message `number`, holds the whole answer.

    That is its content, the names of the functions that it calls, and an end of the turn.
    """
    content = spoken(message)
    calls = names_of_calls(message)
    for part in (content, *calls):
        if part not in text and (part in whole or not calls):
            raise rewritten(number)
    if any(name not in text for name in calls):
        raise without_calls(f"message {number}")
    if content not in text:
        raise BadConversation(f"the chat template does not write the content of message {number}")
    if not is_closed(text, content):
        raise endless()


def check_parts(texts: Sequence[str], answers: Sequence[Message]) -> None:
    """Raise BadConversation unless `texts`, the trained parts of a conversation, hold each answer, its calls and its end.

    Templates may leave out thoughts, and the content beside a tool call.
    """
    trained = "".join(texts)
    contents = [content for message in answers if not message.get("tool_calls") and (content := spoken(message))]
    if any(content not in trained for content in contents):
        raise BadConversation("the chat template does not write the content of an answer")
    if any(name not in trained for message in answers for name in names_of_calls(message)):
        raise without_calls("an answer")
    if not texts or not all(is_closed(text, content) for text in texts for content in contents):
        raise endless()


def without_calls(where: str) -> BadConversation:
    """The error for a template that leaves out the tool calls of `where`."""
    return BadConversation(
        f'the chat template does not write the tool calls of {where}; data.chat_template = "chatml" writes them'
    )


def endless() -> BadConversation:
    """The error for a template that does not train the end of an answer."""
    return BadConversation(
        "the chat template writes no end of an answer, so the model would not learn to stop (data.chat_template). Give a "
        "template that ends each answer with a token, such as {{ eos_token }}, inside its {% generation %} markers if it has any"
    )


def rewritten(number: int) -> BadConversation:
    """The error for a template that writes message `number` differently when others follow."""
    return BadConversation(
        "the chat template rewrites earlier turns, so hwopt cannot find an answer in the text (data.assistant_turns = 'last' "
        f"trains the last answer only; a template with {{% generation %}} markers marks all): message {number}"
    )


def names_of_calls(message: Message) -> list[str]:
    return [str(call.get("function", call).get("name")) for call in message.get("tool_calls") or ()]


def refused(messages: Sequence[Message], error: Exception) -> BadConversation:
    """The error for `messages`, all of a conversation or its begin, that a template does not write."""
    first = next((message["role"] for message in messages if message["role"] not in ("system", "developer")), "assistant")
    if first == "assistant":
        why = "begins with an answer, which the chat template cannot write: put a question before it, or remove it"
        return BadConversation(f"{why} ({first_line(error)})")
    return BadConversation(f"the chat template refuses it: {first_line(error)}")


THOUGHT_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message with the thoughts before its content, in the order in which transformers takes them."""
KNOWN_KEYS = ("role", "content", "name", "id", "tool_call_id", *THOUGHT_KEYS)
"""Keys of a message that are parts of their own, or that many templates leave out because they do not need them."""
THOUGHTS_IN_CONTENT = "thoughts before </think> in the content"
BESIDE_CALLS = "content beside tool calls"
CALLS = "tool calls"
"""Conversations whose answers lack these are refused. The name of a function alone does not tell: "f" is in <end_of_turn>."""
Rendered = tuple[str, list[tuple[int, int]]]  # (text of messages, spans of the answers in it as far as markers say them)
SHORT: list[Message] = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]


def prompts_unasked(text: Callable[..., str]) -> bool:
    """Whether `text` writes the generation prompt behind the last answer of a conversation without being asked."""
    try:
        question, asked = (text(SHORT[:1], {}, add_generation_prompt=asks) for asks in (False, True))
        whole, longer = (text(messages, {}) for messages in (SHORT, [*SHORT, SHORT[0]]))
    except BadConversation:
        return False
    ends = question.rpartition("question")[2], whole.rpartition("answer")[2]
    common = common_length(*(end[::-1] for end in ends))
    return question == asked and not longer.startswith(whole) and re.search(r"\w", ends[0][len(ends[0]) - common :]) is not None


def unasked() -> BadConversation:
    """The error for a template for which `prompts_unasked` holds: the begin of an answer that is not there would be trained."""
    return BadConversation(
        "the chat template begins an answer behind the last message, also without add_generation_prompt (data.chat_template). "
        "Put that line of the template into {% if add_generation_prompt %}"
    )


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


def takes_json(write: Callable[[list[Message], Mapping[str, Any]], Rendered]) -> bool:
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
