"""The job's table `model`: what is trained."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from hwopt.config.job_values import Source, Table, as_tuple

Patterns = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(as_tuple)]


class Model(Table):
    """Either `name` (trained weights) or `config` (random weights)."""

    name: Source | None = None
    """A hub name, or a folder made with save_pretrained()."""
    config: dict[str, Any] | None = None
    """Keys of the architecture's config, with `model_type`."""
    tokenizer: Source | None = None
    """A hub name or folder; default: the model's own, or one trained on the job's texts."""
    revision: str | None = None
    freeze: Patterns = ()
    """Names of modules or parameters that are not trained, with * for any text."""
    train_only: Patterns = ()
    """Names of modules or parameters; nothing else is trained."""

    @model_validator(mode="after")
    def _one_of(self) -> Model:
        if (self.name is None) == (self.config is None):
            raise ValueError('give either name = "…" (trained weights) or config = { model_type = "…" } (random weights)')
        if self.name == "":
            raise ValueError("name is empty; give a hub name or a folder")
        if self.freeze and self.train_only:
            raise ValueError("freeze and train_only exclude each other")
        return self

    @property
    def chooses_weights(self) -> bool:
        return bool(self.freeze or self.train_only)

    @property
    def label(self) -> str:
        return self.name or f"{(self.config or {}).get('model_type')} (random)"
