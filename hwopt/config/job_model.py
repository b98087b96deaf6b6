"""The job's table `model`: what is trained."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, model_validator

from hwopt.config.job_values import FrozenDict, Source, Table


class Model(Table):
    """Either `name` (trained weights) or `config` (random weights)."""

    name: Source | None = None
    """A hub name, or a folder made with save_pretrained()."""
    config: Annotated[dict[str, Any], AfterValidator(FrozenDict)] | None = None
    """Keys of the architecture's config, with `model_type`."""
    tokenizer: Source | None = None
    """A hub name or folder; default: the model's own, or one trained on the job's texts."""
    revision: str | None = None

    @model_validator(mode="after")
    def _one_of(self) -> Model:
        if (self.name is None) == (self.config is None):
            raise ValueError('give either name = "…" (trained weights) or config = { model_type = "…" } (random weights)')
        if self.name == "":
            raise ValueError("name is empty; give a hub name or a folder")
        return self

    @property
    def label(self) -> str:
        """A short name for the screen."""
        return self.name or f"{(self.config or {}).get('model_type')} (random)"
