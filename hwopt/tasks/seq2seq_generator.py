"""Seq2SeqGenerator: the text that an encoder-decoder writes for a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from hwopt.tasks.prediction import Generation, ModelInput, TokenPredictor, Trained
from hwopt.tasks.text_generator import generation_config

if TYPE_CHECKING:
    import torch


class Seq2SeqGenerator(TokenPredictor):
    """Generates with a trained model and transformers' `generate`."""

    columns: ClassVar[Mapping[str, type]] = {"generated_text": str}

    def __init__(self, trained: Trained, model: Any, generation: Generation) -> None:
        self.model, self.tokenizer, self.max_positions = model, trained.tokenizer, trained.max_positions
        self.max_length = trained.job.data.max_length
        self.config = generation_config(model, trained.tokenizer, generation)
        if self.max_positions is not None:
            self.config.max_new_tokens = min(generation.max_new_tokens, self.max_positions - 1)

    def encode(self, inputs: Sequence[Any]) -> list[ModelInput | str]:
        """The tokens of each prompt as in training: longer prompts are truncated to data.max_length, if the job has it."""
        if not inputs:
            return []
        cut = {} if self.max_length is None else {"truncation": True, "max_length": self.max_length}
        found = self.tokenizer(list(inputs), return_attention_mask=False, return_token_type_ids=False, verbose=False, **cut)
        return [self._checked(ids) for ids in found["input_ids"]]

    def predict(self, inputs: dict[str, torch.Tensor]) -> list[tuple[Any, ...]]:
        """(generated text, without special tokens) of each row."""
        tokens = self.model.generate(**inputs, generation_config=self.config)
        return [(text,) for text in self.tokenizer.batch_decode(tokens, skip_special_tokens=True)]

    def _checked(self, ids: list[int]) -> ModelInput | str:
        """The inputs of a prompt, or the reason why it cannot be used."""
        if not ids:
            return "has no tokens"
        if self.max_positions is not None and len(ids) > self.max_positions:
            return f"has {len(ids):,} tokens, more than the model's limit of {self.max_positions:,} (data.max_length truncates)"
        return {"input_ids": ids}
