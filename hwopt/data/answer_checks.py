"""Check that a chat template trains each answer with its content, its tool calls and its end.

Without these checks a template can train something else, and the loss still looks healthy: a call
that is never trained, an answer that never ends.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from hwopt.data.sources.messages import BadConversation, Message
from hwopt.text import first_line

MARKER = re.compile(r"<\|[a-z_]{2,30}\|>|<(?:start|end)_of_turn>")
"""What chat templates write around a turn: <|im_end|>, <|eot_id|>, <end_of_turn>."""


def split_markers(texts: Sequence[str], tokenizer: Any) -> list[str]:
    """The markers of chat templates in the first 100 `texts` that are not one token of `tokenizer`."""
    found = dict.fromkeys(marker for text in texts[:100] for marker in MARKER.findall(text))
    return [marker for marker in found if len(tokenizer(marker, add_special_tokens=False)["input_ids"]) != 1]


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
    calls = [(name, "tool calls") for name in names_of_calls(message)]
    for part, what in ((content, "content"), *calls):
        if part not in text and (part in whole or not calls):
            raise rewritten(number)
        if part not in text:
            raise BadConversation(f"the chat template does not write the {what} of message {number}")
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
        raise BadConversation("the chat template does not write the tool calls of an answer")
    if not texts or not all(is_closed(text, content) for text in texts for content in contents):
        raise endless()


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
    """The names of the functions that a message calls."""
    return [str(call.get("function", call).get("name")) for call in message.get("tool_calls") or ()]


def refused(messages: Sequence[Message], error: Exception) -> BadConversation:
    """The error for `messages`, all of a conversation or its begin, that a template does not write."""
    first = next((message["role"] for message in messages if message["role"] not in ("system", "developer")), "assistant")
    if first == "assistant":
        why = "begins with an answer, which the chat template cannot write: put a question before it, or remove it"
        return BadConversation(f"{why} ({first_line(error)})")
    return BadConversation(f"the chat template refuses it: {first_line(error)}")
