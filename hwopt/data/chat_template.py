"""Apply a chat template (Jinja, as in transformers) to conversations, and find the tokens of the assistant.

Answers are found by `{% generation %}` markers: those of the tokenizer's own template, or those of TRL's training template where
TRL knows the tokenizer's. In other templates an answer is the text from the end of the generation prompt to the end of the turn.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from hwopt.data import answer_checks as checks
from hwopt.data.chatml import CHATML
from hwopt.data.sources.chat import Conversation
from hwopt.data.sources.messages import BadConversation, Message, with_json_arguments
from hwopt.errors import InputError
from hwopt.system.paths import read_regular_file

Turns = Literal["all", "last"]
Words = Mapping[str, Any]  # what a template reads beside the messages: "tools", and switches such as "enable_thinking"
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
MAX_TEMPLATE_BYTES = 1_000_000


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


def set_eos_token(tokenizer: Any, token: str) -> None:
    """Make `token` the end-of-text token of `tokenizer`. Raises InputError if it has no such token."""
    if token not in tokenizer.get_vocab():
        raise InputError(f"data.eos_token: {token!r} is not a token of the tokenizer. Give one that it has")
    tokenizer.eos_token = token


def special_texts(tokenizer: Any) -> list[str]:
    """The tokens that `tokenizer` leaves out of a text with skip_special_tokens=True."""
    return [added.content for added in tokenizer.added_tokens_decoder.values() if added.special]


def training_template(tokenizer: Any) -> str | None:
    """TRL's training template for the tokenizer's chat template; None if TRL does not know that.

    It has markers and does not rewrite earlier turns. The import takes seconds and brings torch.
    """
    from trl.chat_template_utils import get_training_chat_template

    try:
        return get_training_chat_template(tokenizer)
    except Exception:  # ValueError, or what an unknown template raises for TRL's test conversations
        return None


@dataclass(frozen=True)
class ChatTemplate:
    tokenizer: Any
    turns: Turns  # which turns of the assistant are trained on
    json_calls: dict[str, bool] = field(default_factory=dict, repr=False, compare=False)
    """Template that had tool calls to write -> whether it takes their arguments as JSON text."""

    @cached_property
    def replaced(self) -> str | None:
        """TRL's training template; None if the tokenizer's own is used in training."""
        return None if self._has_markers else training_template(self.tokenizer)

    @property
    def writes_date(self) -> bool:
        """Whether a template that training uses can write the date of today, as those of gpt-oss and Llama 3.2."""
        return "strftime_now" in f"{self.tokenizer.chat_template}{self.replaced}"

    def note(self, given: str | None) -> str:
        """Says which template writes the conversations, and how the answers are found. `given`: data.chat_template."""
        if self.replaced is not None:
            return "chat template: TRL's training variant of the tokenizer's; final/ keeps the tokenizer's"
        found = "its generation markers" if self._has_markers else "the text that each answer adds"
        return f"chat template: {given or 'that of the tokenizer'}; answers are found by {found}"

    def end_token(self) -> int | None:
        """The token that ends an answer; None if an answer ends with ordinary text, or the template refuses a short question."""
        try:
            text = self.trained_text(checks.SHORT, {})
        except BadConversation:
            return None
        special = {*self.tokenizer.all_special_ids, *self.tokenizer.added_tokens_decoder}
        behind = self.tokenizer(text.rpartition("answer")[2], add_special_tokens=False)["input_ids"]
        return next((token for token in behind if token in special), None)

    @cached_property
    def headers(self) -> list[str]:
        """What is between the generation prompt, the thoughts and the content of an answer, the longest first.

        Only what has a special token: gpt-oss has `<|channel|>final<|message|>`, of which a text without those keeps "final".
        """
        found: set[str] = set()
        for thoughts in ({}, dict.fromkeys(checks.THOUGHT_KEYS, "thoughts")):
            try:
                asked = self.text(checks.SHORT[:1], {}, add_generation_prompt=True)
                text = self.trained_text([checks.SHORT[0], checks.SHORT[1] | thoughts], {})
            except BadConversation:
                continue
            found.update(text[checks.common_length(asked, text) :].rpartition("answer")[0].split("thoughts"))
        special = special_texts(self.tokenizer)
        return sorted((header for header in found if any(token in header for token in special)), key=len, reverse=True)

    @cached_property
    def prompts_unasked(self) -> bool:
        return checks.prompts_unasked(self.text)

    def encode(self, conversation: Conversation) -> tuple[list[int], list[bool]]:
        """(tokens, whether each is one of the assistant). A token partly in an answer belongs to it.

        Raises BadConversation if the template refuses the conversation, lacks an answer or its end, or rewrites earlier turns.
        """
        if self.prompts_unasked and (conversation.prompt or not (self.replaced or self._has_markers)):
            raise checks.unasked()
        called = any(conversation.messages[number].get("tool_calls") for number in conversation.answers)
        if called and checks.CALLS in self.left_out(conversation):
            raise checks.without_calls("an answer")
        if conversation.prompt and self.turns == "all":
            return self.completed(conversation)
        text, spans = self.render(conversation)
        tokens, offsets = self.tokens(text)
        return tokens, [any(start < last and first < end for first, last in spans) for start, end in offsets]

    def tokens(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """(tokens of a text that has its special tokens, the span of characters of each)."""
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return encoded["input_ids"], encoded["offset_mapping"]

    def render(self, conversation: Conversation) -> tuple[str, list[tuple[int, int]]]:
        """(text, spans of the assistant's turns in characters)."""
        words, (messages, answers) = conversation.template_words, self.trained_part(conversation)
        if self.replaced is None and not self._has_markers:
            return self.grown(messages, words, answers)
        text, spans = self.marked(messages, words)
        if self.turns == "last":
            before = checks.common_length(text, self.marked(messages[:-1], words)[0])
            spans = [(max(start, before), end) for start, end in spans if end > before]
        else:
            for number in conversation.untrained:
                spans = checks.without(spans, self.turn(text, spans, messages, words, number))
        trained = [text[start:end] for start, end in spans]
        checks.check_parts(trained, [messages[number] for number in answers])
        return text, spans

    def left_out(self, conversation: Conversation) -> list[str]:
        """What the template does not write of the conversation, such as "tools"."""
        completes = conversation.prompt and self.turns == "all"
        words = {**conversation.template_words, **(self.completing if completes else {})}
        return checks.left_out(self.text if completes else self.trained_text, *self.trained_part(conversation), words)

    def trained_part(self, conversation: Conversation) -> tuple[list[Message], list[int]]:
        """(messages, indices of the answers to train): without what follows the last answer if only that is trained."""
        messages, answers = conversation.messages, conversation.answers
        return (messages, answers) if self.turns == "all" else (messages[: answers[-1] + 1], answers[-1:])

    def trained_text(self, messages: list[Message], words: Words) -> str:
        """The text of `messages` by the template that training uses. Raises BadConversation."""
        marked = self.replaced is not None or self._has_markers
        return self.marked(messages, words)[0] if marked else self.text(messages, words)

    def completed(self, conversation: Conversation) -> tuple[list[int], list[bool]]:
        """As `encode`: all tokens from where they leave those of the prompt with its generation prompt, as in TRL."""
        messages, words = conversation.messages, {**conversation.template_words, **self.completing}
        text, asked = self.text(messages, words), self.text(messages[: conversation.prompt], words, add_generation_prompt=True)
        tokens, offsets = self.tokens(text)
        start = checks.common_length(self.tokens(asked)[0], tokens)
        checks.check_parts(
            [text[begin:] for begin, _ in offsets[start : start + 1]], [messages[number] for number in conversation.answers]
        )
        return tokens, [at >= start for at in range(len(tokens))]

    @cached_property
    def completing(self) -> Words:
        """Chooses the template that writes completions: the tokenizer's own, as in TRL.

        If that writes no end of an answer, as GLM's, it is TRL's training template, as in TRL with assistant_only_loss.
        """
        try:
            ends = self.text(checks.SHORT, {}).rpartition("answer")[2].strip()
        except BadConversation:
            return {}
        return {} if ends or self.replaced is None else {"chat_template": self.replaced}

    def turn(self, text: str, spans: list[tuple[int, int]], messages: list[Message], words: Words, number: int) -> Sequence[int]:
        """What to cut out of `spans`, the marked parts of `text`, for the answer `number`. Raises BadConversation."""
        start = checks.common_length(text, self.marked(messages[:number], words)[0])
        alone, marked = self.marked(messages[: number + 1], words)
        if text.startswith(alone):
            return start, len(alone)
        begins = [begin for begin, _ in marked if start <= begin < checks.common_length(text, alone)]
        found = [span for span in spans if span[0] in begins]  # a template may end a conversation with a token of its own
        if not found or len(found) < len(begins):
            raise checks.rewritten(number + 1)
        return found[0][0], found[-1][1]

    @property
    def _has_markers(self) -> bool:
        return GENERATION.search(str(self.tokenizer.chat_template)) is not None

    def marked(self, messages: list[Message], words: Words) -> tuple[str, list[tuple[int, int]]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        template = self.replaced or self.tokenizer.get_chat_template(tools=words.get("tools"))

        def write(messages: list[Message], words: Words) -> checks.Rendered:
            options = {**self.tokenizer.special_tokens_map, **words, "return_assistant_tokens_mask": True}
            rendered: Any = render_jinja_template([messages], chat_template=template, **options)
            (text,), (spans,) = rendered
            return text, checks.connected(spans)

        return self.written(template, write, messages, words)

    def grown(self, messages: list[Message], words: Words, answers: Sequence[int]) -> tuple[str, list[tuple[int, int]]]:
        """By the text between the generation prompt of each answer and the end of its turn.

        A span begins where the text leaves the prompt, which may open with thoughts that the answer lacks, and ends where the
        text leaves that of a conversation which ends with the turn.
        """
        whole, spans = self.text(messages, words), []
        for number in answers:
            prompt = self.text(messages[:number], words, add_generation_prompt=True) if number else self._opening(whole, words)
            before = checks.common_length(prompt, whole)
            if before < len(prompt) and before < len(self.text(messages[:number], words)):
                raise checks.rewritten(number + 1)
            header, gap = prompt[before:], whole[before:].lstrip()  # a blank may follow a turn that is not the last one
            before = len(whole) - len(gap) + len(header) if header and gap.startswith(header) else before
            after = whole if number == len(messages) - 1 else self.text(messages[: number + 1], words)
            end = checks.common_length(after, whole)
            if end < len(after):  # a template may end a conversation with a token of its own
                end = self._turn_end(whole, before, end, checks.spoken(messages[number]), number)
            checks.check_answer(whole[before:end], messages[number], number + 1, whole)
            spans.append((before, end))
        return whole, spans

    def _opening(self, whole: str, words: Words) -> str:
        """The begin of `whole` up to the answer with which it opens. Templates write no prompt without messages before it."""
        question, asked = (self.text(checks.SHORT[:1], words, add_generation_prompt=asks) for asks in (False, True))
        header = asked[checks.common_length(question, asked) :]
        if not header or header not in whole:
            raise BadConversation(
                "begins with an answer, and the chat template has no generation prompt: put a question before it, or remove it"
            )
        return whole[: whole.index(header) + len(header)]

    def _turn_end(self, text: str, begin: int, end: int, content: str, number: int) -> int:
        """The end of the answer from `begin`, where another rendering leaves `text` at `end`.

        `end` may lie in a token: the answer's own end, or the first token behind it. Only the content tells which.
        """
        if not content:
            raise checks.rewritten(number + 1)
        inside = [span for span in self.tokens(text)[1] if span[0] < end < span[1]]
        first, last = inside[0] if inside else (end, end)
        return first if checks.is_closed(text[begin:first], content) else last

    def text(self, messages: list[Message], words: Words, add_generation_prompt: bool = False) -> str:
        """The text of `messages`. Raises BadConversation."""
        template = words.get("chat_template") or self.tokenizer.get_chat_template(tools=words.get("tools"))

        def write(messages: list[Message], words: Words) -> checks.Rendered:
            options = {**words, "chat_template": template, "tokenize": False, "add_generation_prompt": add_generation_prompt}
            return str(self.tokenizer.apply_chat_template(messages, **options)), []

        return self.written(template, write, messages, words)[0]

    def written(
        self, template: str, write: Callable[[list[Message], Words], checks.Rendered], messages: list[Message], words: Words
    ) -> checks.Rendered:
        """What `write` makes of `messages`, with arguments of calls as `template` takes them. Raises BadConversation."""
        if any(message.get("tool_calls") for message in messages):
            if template not in self.json_calls:
                self.json_calls[template] = checks.takes_json(write)
            if self.json_calls[template]:
                messages = [with_json_arguments(message) if message.get("tool_calls") else message for message in messages]
        try:
            return write(messages, words)
        except Exception as error:  # jinja, and `raise_exception` of templates
            raise checks.refused(messages, error) from error
