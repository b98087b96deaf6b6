"""Answer what a user types, with the language model of a run: turn by turn, each part as soon as it is generated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from hwopt.data.sources.chat import Conversation
from hwopt.data.sources.messages import Message
from hwopt.errors import DataError, DoesNotFitError, InputError
from hwopt.inference.trained_model import find_run_model, load_trained_model
from hwopt.tasks.generators import Generation, TextGenerator
from hwopt.tasks.registry import make_task
from hwopt.text import first_line


class Answerer:
    """The causal language model of a run. One that was trained on conversations remembers the turns of this one."""

    def __init__(self, run: Path, cache: Path, assignments: Sequence[str], generation: Generation) -> None:
        """Raises InputError if the run's task does not continue a text, or as `load_trained_model` does."""
        found = find_run_model(run, assignments)
        task = make_task(found.job)
        if not (task.generates and task.facts.decoder):
            raise InputError(
                f"hwopt predict without FILE answers in the terminal, and {run} is a run of task.kind = {task.kind!r}. Give a "
                f"file with the columns of its training data, without those of the label: hwopt predict {run} FILE -o OUTPUT"
            )
        self.loaded = load_trained_model(found, cache)
        self.chat = found.settings.chat
        generator = self.loaded.task.predictor(self.loaded.trained, self.loaded.model, generation)
        assert isinstance(generator, TextGenerator)
        self.generator = generator
        self.messages: list[Message] = []
        torch.manual_seed(generation.seed)

    def forget(self) -> None:
        """Begin a new conversation."""
        self.messages = []

    def answer(self, text: str, write: Callable[[str], None]) -> bool:
        """Pass the parts of the answer to `text` to `write`, and return whether the model ended it.

        Raises DataError if the text cannot be used, and DoesNotFitError if memory runs out; the conversation is then unchanged.
        """
        asked: list[Message] = [*self.messages, {"role": "user", "content": text}]
        (row,) = self.generator.encode([Conversation(asked) if self.chat else text])
        if isinstance(row, str):
            raise DataError(f"the {'conversation' if self.chat else 'text'} {row}")
        inputs: dict[str, Any] = {key: value.to(self.loaded.device) for key, value in self.generator.batch([row], 1).items()}
        try:
            with self.loaded.inference():
                answer, ended = self.generator.stream(inputs, write)
        except torch.OutOfMemoryError as error:
            raise DoesNotFitError(f"the answer does not fit into the device's memory: {first_line(error)}") from error
        if self.chat:
            self.messages = [*asked, {"role": "assistant", "content": answer}]
        return ended
