"""Apply a chat template (Jinja, as in transformers) to conversations, and find the tokens of the assistant.

The assistant's tokens come from the template's `{% generation %}` markers, or from the spans by which the text grows with each
turn of the assistant; a template that rewrites earlier turns is refused for all turns but the last.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hwopt.data.chat import BadConversation, Conversation, Message
from hwopt.errors import DataError, InputError
from hwopt.system.paths import read_regular_file
from hwopt.text import first_line

Turns = Literal["all", "last"]
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
