"""The plugins of examples/plugins, on one rank and through a resume."""

import re
from pathlib import Path

import pytest
import torch
from cases import named
from event_calls import calling
from example_plugins import BESIDE, CLASSES, FOLDER, OPTIONS, registry
from safetensors.torch import load_file

from hwopt.plugin.registry import Registry
from hwopt.testing import check_contract_of, plan_for, tiny_job, tiny_profile, train_tiny


@pytest.mark.parametrize("name", named({name: name for name in CLASSES}, ("gradient_noise",), pytest.mark.integration))
def test_example_keeps_the_contract(name: str, tmp_path: Path) -> None:
    """Each example trains, has evidence, and resumes to the same bits."""
    check_contract_of(name, tmp_path, OPTIONS.get(name), registry(), beside=BESIDE.get(name))


def lines_of(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_documents_say_how_long_plugins_are() -> None:
    root = FOLDER.parents[1]
    readme, page = ((root / name).read_text(encoding="utf-8") for name in ("README.md", "docs/plugins.md"))
    found = re.search(r"under (\d+) lines, the\s+built-in ones about (\d+) on average", readme)
    examples, built_in = map(int, found.groups())
    assert f"Each is under {examples} lines." in page
    assert max(map(lines_of, FOLDER.glob("*.py"))) < examples
    number = len([name for name in Registry().names if name not in CLASSES])
    assert sum(map(lines_of, (root / "plugins").rglob("*.py"))) / number == pytest.approx(built_in, rel=0.1)


def test_muon_replaces_the_optimizer_of_a_profile(tmp_path: Path) -> None:
    plan = plan_for(tiny_profile(optimizer={"name": "adamw_torch"}, muon={}), tiny_job(tmp_path / "data"), registry())
    run = train_tiny(plan, tmp_path).run
    kinds = {name: set(run.optimizer.state[p]) for name, p in zip(run.parameter_names, run.engine.parameters, strict=True)}
    hidden = [name for name, kind in kinds.items() if "momentum_buffer" in kind]
    assert len(hidden) == 6 * 2 + 1, "six matrices of each of two layers, and the pooler's"
    assert not any("embeddings" in name or "classifier" in name for name in hidden), hidden


def test_ema_saves_the_average(tmp_path: Path) -> None:
    job = tiny_job(tmp_path / "data", max_steps=3, learning_rate=1e-2, metric_for_best_model="loss", save_steps=1)
    plan = plan_for(tiny_profile(ema={"decay": 0.5}), job, registry())
    weights: list[dict[str, torch.Tensor]] = []

    def keep(run: object, applied: object) -> None:
        parameters = run.inner_model.named_parameters()
        weights.append({name: p.detach().clone() for name, p in parameters})

    plan.recipe.events.append(calling(on_step_end=keep))
    run = train_tiny(plan, tmp_path).run
    assert run.step == 3
    name = "classifier.weight"
    first, second, third = (each[name] for each in weights)
    average = torch.lerp(third, torch.lerp(second, first, 0.5), 0.5)
    assert torch.allclose(load_file(tmp_path / "run" / "final" / "model.safetensors")[name], average, atol=1e-6)
