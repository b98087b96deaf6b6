"""The code of docs/plugins.md as an installed package: on one rank, resumed, and on two ranks."""

import importlib
import json
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from installed_task import forget, write_metadata
from integration.ranks_folder import BATCH, evidence, train, write_job, write_profile

from hwopt import api
from hwopt.plugin.recipe import Recipe
from hwopt.plugin.run_view import EVENTS
from hwopt.testing import TINY_BERT, logged

DOCS = Path(__file__).parents[2] / "docs"
PLUGINS: dict[str, dict[str, Any]] = {
    "batch": BATCH,
    "freeze": {"layers": 1},
    "optimizer": {"name": "adamw_torch"},
    "sign_momentum": {},
    "clip_value": {"value": 0.01},
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (DOCS / "plugins.md").read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def declared() -> dict[str, Any]:
    """The pyproject.toml of docs/plugins.md."""
    (text,) = blocks("toml")
    return tomllib.loads(text)


def test_pyproject_of_the_docs_registers_every_plugin_and_task_of_the_docs(package: Path) -> None:
    """`pip install` itself needs a network for setuptools."""
    project = declared()
    assert project["tool"]["setuptools"]["packages"] == [path.parent.name for path in package.glob("*/freeze.py")]
    found = {}
    for entries in project["project"]["entry-points"].values():
        for name, value in entries.items():
            module, _, class_name = value.partition(":")
            loaded = getattr(importlib.import_module(module), class_name)
            found[module] = loaded.facts.kind if hasattr(loaded, "facts") else loaded.name
            assert found[module] == name
    files = {f"my_plugins.{path.stem}" for path in package.glob("my_plugins/*.py")}
    assert files == {*found, "my_plugins.sign_momentum"}, "sign_momentum.py is the optimizer that a plugin imports"


def test_task_of_the_docs_trains_with_its_loss(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"text": f"word {n % 5}", "score": 1000.0 if n == 3 else n % 5 / 5} for n in range(24)]
    (tmp_path / "scores.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "job.toml").write_text(
        tomlkit.dumps(
            {
                "model": {"config": TINY_BERT},
                "data": {"train": "scores.jsonl", "eval": "scores.jsonl", "label": "score"},
                "task": {"kind": "robust-regression"},
                "training": {"max_steps": 2},
            }
        )
    )
    monkeypatch.chdir(tmp_path)
    plan = api.resolve("cpu", "job.toml", cache=tmp_path / "cache")
    api.execute(plan, tmp_path / "run", cache=tmp_path / "cache")
    report = api.evaluate("run", "scores.jsonl", cache=tmp_path / "cache")
    assert report.metrics["loss"] == pytest.approx(1000 / 24, rel=0.1), "absolute errors, not squared ones"
    assert report.metrics["mse"] > 900 * report.metrics["loss"]
    assert api.predict("run", "scores.jsonl", "out.jsonl", cache=tmp_path / "cache").columns == ("predicted_score",)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on sys.path with the files of docs/plugins.md and the metadata of an installed package."""
    folder = tmp_path / "site"
    for block in blocks("python"):
        path = folder / block.splitlines()[0].removeprefix("# ")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block, encoding="utf-8")
    write_metadata(folder, "my_plugins", declared()["project"]["entry-points"])
    monkeypatch.syspath_prepend(str(folder))
    forget()
    yield folder
    forget()
    for name in [name for name in sys.modules if name.split(".")[0] in ("my_plugins", "test_my_plugins")]:
        del sys.modules[name]


@pytest.mark.parametrize("test", ["test_freeze", "test_sign_momentum", "test_clip_value"])
def test_contract_test_of_the_docs_passes(test: str, package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(package / "tests"))
    getattr(importlib.import_module("test_my_plugins"), test)(tmp_path)


def test_two_ranks_match_one_rank(package: Path, warm: None, tmp_path: Path) -> None:
    write_job(tmp_path, max_steps=6, eval_steps=3)
    write_profile(tmp_path, PLUGINS)
    one, two = train(tmp_path, "one"), train(tmp_path, "two", 2)
    for run in (one, two):
        found = evidence(run)
        assert {found[plugin] for plugin in ("freeze", "sign_momentum", "clip_value")} == {"active"}
        assert "optimizer" not in found, "replaced by sign_momentum"
    plan = json.loads((two / "plan.json").read_text())
    assert plan["world_size"] == 2
    reasons = {entry["name"]: entry["reason"] for entry in plan["plugins"]}
    assert reasons["optimizer"].startswith("replaced by plugin 'sign_momentum' (")
    # 1e-3: the sign of a gradient that is zero up to rounding may differ
    assert logged(two, "loss") == pytest.approx(logged(one, "loss"), rel=1e-3)
    assert logged(two, "eval_loss") == pytest.approx(logged(one, "eval_loss"), rel=1e-3)


def test_docs_list_every_field_and_event() -> None:
    fields = re.findall(r"^\| `(\w+)` \|", (DOCS / "recipe.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(fields) == sorted(Recipe.__annotations__)
    text = (DOCS / "plugins.md").read_text(encoding="utf-8")
    assert all(f"`{event}`" in text for event in EVENTS)
