"""TextGenerator: the text that a causal language model generates after a prompt."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from hwopt.data.chat_template import ChatTemplate, set_template
from hwopt.data.sources.chat import BadConversation, Conversation
from hwopt.data.tokenizer import tokens_of
from hwopt.tasks.prediction import Generation, ModelInput, TokenPredictor, Trained

if TYPE_CHECKING:
    import torch


class TextGenerator(TokenPredictor):
    """Generates with a trained model and transformers' `generate`."""

    columns: ClassVar[Mapping[str, type]] = {"generated_text": str}
    padding_side: ClassVar[Literal["left", "right"]] = "left"

    def __init__(self, trained: Trained, model: Any, generation: Generation) -> None:
        self.model, self.tokenizer, self.max_positions = model, trained.tokenizer, trained.max_positions
        self.max_new_tokens = generation.max_new_tokens
        if not trained.tokenizer.chat_template and trained.job.data.chat_template is not None:
            set_template(trained.tokenizer, trained.job.data.chat_template)
        self.config = generation_config(model, trained.tokenizer, generation)

    def encode(self, inputs: Sequence[Any]) -> list[ModelInput | str]:
        """The tokens of each prompt or conversation, as in training. They are not truncated."""
        if not inputs:
            return []
        if not isinstance(inputs[0], Conversation):
            return [self._checked(ids) for ids in tokens_of(self.tokenizer, list(inputs), special=True)]
        return [self._of_conversation(conversation) for conversation in inputs]

    def _of_conversation(self, conversation: Conversation) -> ModelInput | str:
        """The tokens up to the assistant's answer, or the reason why the chat template refuses the conversation."""
        if not self.tokenizer.chat_template:
            return "is a conversation, and the tokenizer of the model has no chat template"
        template = ChatTemplate(self.tokenizer, "last")
        try:
            text = template.text(conversation.messages, conversation.tools, add_generation_prompt=True)
        except BadConversation as error:
            return str(error)
        return self._checked(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def predict(self, inputs: dict[str, torch.Tensor]) -> list[tuple[Any, ...]]:
        """(generated text, without the prompt and special tokens) of each row."""
        width = inputs["input_ids"].shape[1]
        config = copy.deepcopy(self.config)
        if self.max_positions is not None:
            config.max_new_tokens = min(self.max_new_tokens, self.max_positions - width)
        tokens = self.model.generate(**inputs, generation_config=config)[:, width:]
        return [(text,) for text in self.tokenizer.batch_decode(tokens, skip_special_tokens=True)]

    def _checked(self, ids: list[int]) -> ModelInput | str:
        """The inputs of a prompt, or the reason why it cannot be used."""
        if not ids:
            return "has no tokens"
        if self.max_positions is not None and len(ids) >= self.max_positions:
            return f"has {len(ids):,} tokens, which leaves no room to generate: the model's limit is {self.max_positions:,}"
        return {"input_ids": ids}


def generation_config(model: Any, tokenizer: Any, generation: Generation) -> Any:
    """The model's GenerationConfig with the options of `generation`. Without sampling, its sampling options are reset."""
    import transformers

    config = copy.deepcopy(model.generation_config) or transformers.GenerationConfig()
    default = transformers.GenerationConfig()
    config.max_length, config.max_new_tokens = None, generation.max_new_tokens
    config.do_sample = generation.do_sample
    for key in ("temperature", "top_p", "top_k", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"):
        if not generation.do_sample and hasattr(config, key):
            setattr(config, key, getattr(default, key, None))
    if generation.do_sample and generation.temperature is not None:
        config.temperature = generation.temperature
    if generation.do_sample and generation.top_p is not None:
        config.top_p = generation.top_p
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    ends = sorted({end for end in (*ends, tokenizer.eos_token_id) if end is not None})
    config.eos_token_id = ends or None
    config.pad_token_id = tokenizer.pad_token_id
    return config
