from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hwopt.config.job import JobFile
from hwopt.errors import InputError, PluginError
from hwopt.model.frozen import freeze
from hwopt.saving.reader import load_checkpoint
from hwopt.testing import plan_for, tiny_job, tiny_profile, train_tiny
from hwopt_plugins.adapter import Adapter


def model() -> torch.nn.Module:
    layers = torch.nn.ModuleList([torch.nn.Linear(2, 2) for _ in range(3)])
    body = torch.nn.ModuleDict({"embeddings": torch.nn.Embedding(4, 2), "layers": layers})
    return torch.nn.ModuleDict({"body": body, "head": torch.nn.Linear(2, 1)})


def trained(found: torch.nn.Module) -> set[str]:
    return {name.rpartition(".")[0] for name, p in found.named_parameters() if p.requires_grad}


LAYERS = {f"body.layers.{number}" for number in range(3)}
CHOICES: list[tuple[dict[str, Any], set[str]]] = [
    ({"frozen": ["body"], "trained": []}, {"head"}),
    ({"frozen": ["*embeddings", "*layers.[01]"], "trained": []}, {"body.layers.2", "head"}),
    ({"frozen": [], "trained": ["head", "*.bias"]}, LAYERS | {"head"}),
    ({"frozen": [], "trained": ["head"]}, {"head"}),
]


@pytest.mark.parametrize(("patterns", "expected"), CHOICES)
def test_patterns_choose_modules_and_parameters(patterns: dict[str, Any], expected: set[str]) -> None:
    found = model()
    freeze(found, **patterns)
    assert trained(found) == expected


def test_pattern_without_a_weight_and_a_model_without_training_are_refused() -> None:
    with pytest.raises(InputError, match=r"model\.freeze: 'bodi' matches no weight of the model\. Did you mean 'body'\?"):
        freeze(model(), ["bodi"], [])
    with pytest.raises(InputError, match="no weight is left to train"):
        freeze(model(), ["*"], [])


def chosen(file: JobFile, **keys: Any) -> JobFile:
    model = file.job.model.model_copy(update=keys)
    return replace(file, job=file.job.model_copy(update={"model": model}))


def test_frozen_weights_keep_their_bits_and_have_no_state(tmp_path: Path) -> None:
    job = chosen(tiny_job(tmp_path / "data", max_steps=2, save_steps=1), freeze=("*embeddings", "*layer.0"))
    recorder = train_tiny(plan_for(tiny_profile(), job), tmp_path)
    first, last = (load_checkpoint(tmp_path / "run" / f"checkpoint-{step}").state["engine"] for step in (1, 2))
    assert first["parameters"].keys() == last["parameters"].keys()
    assert not any("embeddings" in name or "layer.0." in name for name in last["optimizer"]["states"])
    assert any("layer.1." in name for name in last["optimizer"]["states"])
    (message,) = (text for text in recorder.messages if "model.freeze" in text)
    assert message.startswith("trains ")


@pytest.mark.parametrize("chosen_by_user", [False, True])
def test_adapter_beside_the_key_is_skipped_or_refused_if_the_user_named_it(chosen_by_user: bool, tmp_path: Path) -> None:
    plan = plan_for(tiny_profile(), chosen(tiny_job(tmp_path / "data"), train_only=("classifier",)))
    context = replace(plan.context, chosen=frozenset({"adapter"} if chosen_by_user else ()))
    if chosen_by_user:
        with pytest.raises(PluginError, match="so does an adapter; remove one"):
            Adapter(Adapter.Options()).probe(context)
    else:
        assert Adapter(Adapter.Options()).probe(context).kind == "skip"
