"""The code of docs/plugins.md as an installed package: on one rank, resumed, and on two ranks."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from integration.forks import run_ranks

from hwopt.plugin.recipe import EVENTS, Recipe
from hwopt.testing import TINY_BERT, logged, write_samples

DOCS = Path(__file__).parents[2] / "docs"
PROFILE = """name = "mine"
plugins.batch = { train = 3, effective = 12 }
plugins.freeze = { layers = 1 }
plugins.optimizer = { name = "adamw_torch" }
plugins.lion = {}
plugins.clip_value = { value = 0.01 }
"""


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (DOCS / "plugins.md").read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on sys.path with the files of docs/plugins.md and the metadata of an installed package."""
    folder = tmp_path / "site"
    for block in blocks("python"):
        path = folder / block.splitlines()[0].removeprefix("# ")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block, encoding="utf-8")
    metadata = folder / "my_plugins-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my-plugins\nVersion: 1.0\n")
    (entry_points,) = blocks("toml")
    header, *lines = entry_points.splitlines()
    assert header == '[project.entry-points."hwopt.plugins"]'
    (metadata / "entry_points.txt").write_text("\n".join(["[hwopt.plugins]", *lines]).replace('"', ""))
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    for name in [name for name in sys.modules if name.split(".")[0] in ("my_plugins", "test_my_plugins")]:
        del sys.modules[name]


def write_job(folder: Path) -> None:
    write_samples(folder / "train.jsonl", 41)
    write_samples(folder / "dev.jsonl", 13, seed=1)
    config = ", ".join(f"{key} = {json.dumps(value)}" for key, value in TINY_BERT.items())
    (folder / "job.toml").write_text(
        f'[model]\nconfig = {{ {config} }}\n[data]\ntrain = "train.jsonl"\neval = "dev.jsonl"\nmax_length = 32\n'
        "[training]\nmax_steps = 6\nlearning_rate = 1e-3\nlogging_steps = 1\neval_steps = 3\n"
    )
    (folder / "mine.toml").write_text(PROFILE)


@pytest.mark.parametrize("test", ["test_freeze", "test_lion", "test_clip_value"])
def test_contract_test_of_the_docs_passes(test: str, package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(package / "tests"))
    getattr(importlib.import_module("test_my_plugins"), test)(tmp_path)


def test_two_ranks_match_one_rank(package: Path, warm: None, tmp_path: Path) -> None:
    write_job(tmp_path)
    folders = {}
    for ranks, name in ((1, "one"), (2, "two")):
        command, output = ["run", "job.toml", "--profile", "mine.toml", "--name", name], tmp_path / f"{name}.out"
        assert run_ranks(command, ranks, tmp_path, output) == [0] * ranks, output.read_text()[-3000:]
        folders[name] = tmp_path / "runs" / name
        evidence = {e["name"]: e["status"] for e in json.loads((folders[name] / "evidence.json").read_text())["plugins"]}
        assert {evidence[plugin] for plugin in ("freeze", "lion", "clip_value")} == {"active"}
        assert "optimizer" not in evidence, "replaced by lion"
    plan = json.loads((folders["two"] / "plan.json").read_text())
    assert plan["world_size"] == 2
    reasons = {entry["name"]: entry["reason"] for entry in plan["plugins"]}
    assert reasons["optimizer"].startswith("replaced by plugin 'lion' (")
    # 1e-3: the sign of a gradient that is zero up to rounding may differ
    assert logged(folders["two"], "loss") == pytest.approx(logged(folders["one"], "loss"), rel=1e-3)
    assert logged(folders["two"], "eval_loss") == pytest.approx(logged(folders["one"], "eval_loss"), rel=1e-3)


def test_docs_list_every_field_and_event() -> None:
    fields = re.findall(r"^\| `(\w+)` \|", (DOCS / "recipe.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(fields) == sorted(Recipe.__annotations__)
    text = (DOCS / "plugins.md").read_text(encoding="utf-8")
    assert all(f"`{event}`" in text for event in EVENTS)
