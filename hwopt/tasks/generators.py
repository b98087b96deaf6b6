"""Predictors that generate text, from texts or conversations."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from hwopt.data.chat_template import ChatTemplate, set_template, special_texts
from hwopt.data.sources.chat import Conversation
from hwopt.data.sources.messages import BadConversation
from hwopt.data.tokenizer import tokens_of
from hwopt.tasks.predictors import ModelInput, TextPredictor
from hwopt.tasks.prepared import Trained

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Generation:
    """How text is generated, in the words of transformers' GenerationConfig."""

    max_new_tokens: int = 128
    do_sample: bool = False
    temperature: float | None = None
    top_p: float | None = None
    seed: int = 0  # of the random numbers that sampling draws


class Seq2SeqGenerator(TextPredictor):
    """The text that an encoder-decoder writes for a prompt, without special tokens."""

    columns: Mapping[str, type] = {"generated_text": str}

    def __init__(self, trained: Trained, model: Any, generation: Generation) -> None:
        super().__init__(trained, model)
        self.max_new_tokens = generation.max_new_tokens
        self.config = generation_config(model, trained.tokenizer, generation)

    def predict(self, inputs: dict[str, torch.Tensor]) -> list[tuple[Any, ...]]:
        return [(self.decoded(row),) for row in self.generated(inputs, first=0, taken=1)]

    def generated(self, inputs: dict[str, torch.Tensor], first: int, taken: int, streamer: Any = None) -> list[list[int]]:
        """The tokens of each row from number `first` on; `taken`: positions of the model that are not free."""
        config = copy.deepcopy(self.config)
        if self.max_positions is not None:
            config.max_new_tokens = min(self.max_new_tokens, self.max_positions - taken)
        tokens: list[list[int]] = self.model.generate(**inputs, generation_config=config, streamer=streamer)[:, first:].tolist()
        return tokens

    def decoded(self, tokens: list[int]) -> str:
        """The text of generated tokens, without special ones."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))


class TextGenerator(Seq2SeqGenerator):
    """The text that a causal language model generates after a prompt or a conversation, without special tokens."""

    padding_side: ClassVar[Literal["left", "right"]] = "left"

    def __init__(self, trained: Trained, model: Any, generation: Generation) -> None:
        if not trained.tokenizer.chat_template and trained.job.data.chat_template is not None:
            set_template(trained.tokenizer, trained.job.data.chat_template)
        super().__init__(trained, model, generation)
        self.headers: list[str] = []
        self.template = ChatTemplate(trained.tokenizer, "last") if trained.tokenizer.chat_template else None
        if self.template is not None:  # an adapter's folder has no generation_config.json
            self.headers, end = self.template.headers, self.template.end_token()
            self.config.eos_token_id = sorted({*(self.config.eos_token_id or ()), *([] if end is None else [end])}) or None

    def decoded(self, tokens: list[int]) -> str:
        """Also without the headers of the chat template: a blank line is between thoughts and answer then."""
        return "\n\n".join(self.parts(tokens))

    def parts(self, tokens: list[int], complete: bool = True) -> list[str]:
        """The text of generated tokens between the headers of the chat template: the thoughts and the answer.

        Without `complete`, more tokens follow, and what may become a header or another letter is left out.
        """
        if not self.headers:
            text = super().decoded(tokens)
            return [text if complete else text.rstrip("\ufffd")]
        text, headers = str(self.tokenizer.decode(tokens)), "|".join(map(re.escape, self.headers))
        if not complete:
            begins = {header[:length] for header in self.headers for length in range(1, len(header))}
            found = [match.span() for match in re.finditer(headers, text)]
            places = (at for at in range(len(text)) if text[at:] in begins and not any(a < at < b for a, b in found))
            text = text[: next(places, None)].rstrip("\ufffd")
        special = "|".join(map(re.escape, special_texts(self.tokenizer)))
        parts = (re.sub(special, "", part) for part in re.split(headers, text))
        return [part for part in parts if part]

    def encode(self, inputs: Sequence[Any]) -> list[ModelInput | str]:
        """The tokens of each prompt or conversation, as in training. They are not truncated."""
        if not inputs:
            return []
        if not isinstance(inputs[0], Conversation):
            return [self.checked({"input_ids": ids}) for ids in tokens_of(self.tokenizer, list(inputs))]
        return [self._of_conversation(conversation) for conversation in inputs]

    def _of_conversation(self, conversation: Conversation) -> ModelInput | str:
        """The tokens up to the assistant's answer, or the reason why the chat template refuses the conversation."""
        if self.template is None:
            return "is a conversation, and the tokenizer of the model has no chat template"
        try:
            text = self.template.text(conversation.messages, conversation.template_words, add_generation_prompt=True)
        except BadConversation as error:
            return str(error)
        return self.checked({"input_ids": self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]})

    def checked(self, row: ModelInput) -> ModelInput | str:
        length = self.length(row)
        if self.max_positions is not None and length >= self.max_positions:
            return f"has {length:,} tokens, which leaves no room to generate: the model's limit is {self.max_positions:,}"
        return super().checked(row)

    def predict(self, inputs: dict[str, torch.Tensor]) -> list[tuple[Any, ...]]:
        width = inputs["input_ids"].shape[1]
        return [(self.decoded(row),) for row in self.generated(inputs, first=width, taken=width)]

    def stream(self, inputs: dict[str, torch.Tensor], write: Callable[[str], None]) -> tuple[str, bool]:
        """(the answer without its thoughts, whether the model ended it) of one row; `write` gets all of its text in parts."""
        width = inputs["input_ids"].shape[1]
        streamer = Streamer(self, write)
        (tokens,) = self.generated(inputs, first=width, taken=width, streamer=streamer)
        streamer.show(complete=True)
        parts = self.parts(tokens)
        return parts[-1] if parts else "", tokens[-1] in (self.config.eos_token_id or ())


class Streamer:
    """Passes on the text of tokens while they are generated, as transformers' streamers do."""

    def __init__(self, generator: TextGenerator, write: Callable[[str], None]) -> None:
        self.generator, self.write = generator, write
        self.tokens: list[int] = []
        self.shown: str | None = None
        """What was passed on; None before the prompt, which comes first."""

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt, then each token."""
        if self.shown is None:
            self.shown = ""
            return
        self.tokens += value.flatten().tolist()
        self.show()

    def end(self) -> None:
        """transformers calls this after the last token."""

    def show(self, complete: bool = False) -> None:
        """Pass on what is new."""
        text, shown = "\n\n".join(self.generator.parts(self.tokens, complete)), self.shown or ""
        if text.startswith(shown) and text != shown:
            self.write(text[len(shown) :])
            self.shown = text


def generation_config(model: Any, tokenizer: Any, generation: Generation) -> Any:
    """The model's GenerationConfig with the options of `generation`. Without sampling, its sampling options are reset."""
    import transformers

    config = copy.deepcopy(model.generation_config) or transformers.GenerationConfig()
    default = transformers.GenerationConfig()
    config.max_length, config.max_new_tokens = None, generation.max_new_tokens
    config.do_sample = generation.do_sample
    for key in ("temperature", "top_p", "top_k", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"):
        given = getattr(generation, key, None)
        if not generation.do_sample:
            setattr(config, key, getattr(default, key, None))
        elif given is not None:
            setattr(config, key, given)
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    ends = sorted({end for end in (*ends, tokenizer.eos_token_id) if end is not None})
    config.eos_token_id = ends or None
    config.pad_token_id = tokenizer.pad_token_id
    return config
