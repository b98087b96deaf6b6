"""What is written of a model, also of one that is not from transformers."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from applied import Applied
from safetensors.torch import load_file

from hwopt import api
from hwopt.plugin import Context, Evidence, Recipe, RunView, Stage
from hwopt.plugin.registry import Registry
from hwopt.testing import plan_for, tiny_job, tiny_profile


class Bag(torch.nn.Module):
    """A classifier that is only a torch module: the mean of embeddings, tied to a second name."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(rows, 8)
        self.again = self.embedding
        self.head = torch.nn.Linear(8, 2)

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        return SimpleNamespace(logits=self.head(self.embedding(input_ids).mean(1)))


class OwnModel(Applied):
    name, stage, effect = "own_model", Stage.MODEL, "method"

    def apply(self, recipe: Recipe, context: Context) -> None:
        recipe.model_steps.append(lambda model, run: Bag(model.get_input_embeddings().num_embeddings))

    def evidence(self, run: RunView) -> Evidence:
        return Evidence.active(type(run.inner_model).__name__)


def test_model_without_save_pretrained_is_saved_as_a_state_dict(tmp_path: Path) -> None:
    registry = Registry()
    registry.add(OwnModel)
    plan = plan_for(tiny_profile(own_model={}), tiny_job(tmp_path / "data", max_steps=4, save_steps=2), registry)
    api.execute(plan, tmp_path / "run", cache=tmp_path / "cache")
    saved = load_file(tmp_path / "run" / "final" / "model.safetensors")
    model = Bag(len(saved["embedding.weight"]))
    model.load_state_dict(saved)
    assert (tmp_path / "run" / "final" / "tokenizer.json").is_file()
    assert set(load_file(tmp_path / "run" / "checkpoint-4" / "model.safetensors")) == set(saved)
    api.execute(plan, tmp_path / "run", cache=tmp_path / "cache", resume=True)
