"""TagPredictor: the most probable tag of each word."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hwopt.tasks.prediction import ModelInput, TokenPredictor, Trained
from hwopt.tasks.prepared import IGNORED
from hwopt.tasks.tagged_words import refuse_slow, tokens_of_words
from hwopt.tasks.text_predictors import checked_length

if TYPE_CHECKING:
    import torch

WORDS, COUNT = "words", "word_count"
"""Inputs that do not go into the model: the word that each token begins, and the number of words in the first place."""


class TagPredictor(TokenPredictor):
    """Tags the words of sentences."""

    columns: Mapping[str, type] = {"predicted_tags": list}

    def __init__(self, trained: Trained, model: Any) -> None:
        self.model, self.labels, self.tokenizer = model, trained.label_names, trained.tokenizer
        self.max_length, self.max_positions = trained.job.data.max_length, trained.max_positions

    def encode(self, inputs: Sequence[Any]) -> list[ModelInput | str]:
        """The tokens of each sentence as in training; each token also has the word that it begins, from 1, or 0."""
        refuse_slow(self.tokenizer, self.max_length)
        if not inputs:
            return []
        found: list[ModelInput | str] = []
        encoded = tokens_of_words(self.tokenizer, inputs, self.max_length)
        for sentence, (tokens, words, _) in zip(inputs, encoded, strict=True):
            begins = [0 if word == IGNORED else word + 1 for word in words]
            row = {"input_ids": list(tokens), WORDS: begins, COUNT: [len(sentence)]}
            found.append(checked_length(row, self.max_positions))
        return found

    def predict(self, inputs: dict[str, torch.Tensor]) -> list[tuple[Any, ...]]:
        """(the tag of each word; None for a word without a token, or behind data.max_length) of each row."""
        words, counts = inputs.pop(WORDS).tolist(), inputs.pop(COUNT)[:, 0].tolist()
        numbers = self.model(**inputs).logits.argmax(-1).tolist()
        found = []
        for own, tags, count in zip(words, numbers, counts, strict=True):
            of_word = {word - 1: self.labels[tag] for word, tag in zip(own, tags, strict=True) if word}
            found.append(([of_word.get(word) for word in range(count)],))
        return found
