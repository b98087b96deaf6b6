"""final/README.md: a card for the hub that says how the model was made."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import ModelCard, metadata_load
from transformers import pipeline

from hwopt.config.job import make_job
from hwopt.config.toml import Document
from hwopt.saving.model_card import base_license, code, plain
from hwopt.system.atomic_folder import find_corruption
from hwopt.testing import plan_for, tiny_job, tiny_profile, train_tiny, write_samples


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with test data, on a base model with a card."""
    folder = tmp_path_factory.mktemp("card")
    train_tiny(plan_for(tiny_profile(), tiny_job(folder / "data", max_steps=1)), folder / "first")
    base = Path(shutil.copytree(folder / "first/run/final", folder / "base"))
    (base / "README.md").write_text("---\nlicense: other\nlicense_name: my-license\nlanguage: en\n---\n# Base\n")
    test = write_samples(folder / "test.jsonl", 20, seed=2)
    first = tiny_job(folder / "data", data={"test": str(test)})
    training = {"max_steps": 6, "eval_steps": 2, "learning_rate": 0.01, "logging_steps": 2}
    tables = first.document.data | {"model": {"name": str(base)}, "training": training}
    train_tiny(plan_for(tiny_profile(), make_job(Document("a job", tables))), folder)
    return folder / "run"


def test_card_has_the_metadata_of_the_hub(run: Path) -> None:
    metadata = metadata_load(run / "final/README.md")
    assert metadata == {
        "library_name": "transformers",
        "license": "other",
        "license_name": "my-license",
        "pipeline_tag": "text-classification",
        "tags": ["hwopt"],
    }
    ModelCard.load(run / "final/README.md")
    assert find_corruption(run / "final") == ""


def test_card_has_data_results_training_and_versions(run: Path) -> None:
    card = (run / "final/README.md").read_text()
    summary = json.loads((run / "summary.json").read_text())
    assert "License of the base model: other." in card
    assert "| training | train.jsonl | 40 |" in card
    assert "| evaluation | eval.jsonl | 12 |" in card
    assert "| test | test.jsonl | 20 |" in card
    assert f"| f1 | {summary['best_eval_f1']:.4f} | {summary['test_f1']:.4f} |" in card
    assert "## Classes (test)" in card
    assert f"| colour | {summary['test_classes'][0]['precision']:.4f} |" in card
    assert "| learning\\_rate | 0.01 |" in card
    assert "| steps | 6 |" in card
    assert "| torch | " in card
    assert "profile `tiny`" in card
    assert str(run.parent) not in card  # no path of this machine


def test_code_of_the_card_opens_the_model(run: Path) -> None:
    card = (run / "final/README.md").read_text()
    code = card.split("```python\n")[1].split("```")[0]
    assert 'pipeline("text-classification", model="final")' in code
    found: list[Any] = []
    exec(code.replace('"final"', repr(str(run / "final"))), {"print": found.append})
    assert found[0][0]["label"] in ("colour", "other")


def test_card_of_a_language_model_names_its_pipeline(tmp_path: Path) -> None:
    train_tiny(plan_for(tiny_profile(), tiny_job(tmp_path / "data", "causal-lm", max_steps=1)), tmp_path)
    card = tmp_path / "run/final/README.md"
    assert metadata_load(card)["pipeline_tag"] == "text-generation"
    assert "a llama (random) model" in card.read_text()
    assert "License" not in card.read_text()
    (generated,) = pipeline("text-generation", model=str(card.parent), device="cpu")("red", max_new_tokens=2, max_length=None)
    assert generated["generated_text"].startswith("red")


def test_a_base_without_a_readable_card_has_no_license(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert base_license(SimpleNamespace(name=str(tmp_path), revision=None)) == {}
    (tmp_path / "README.md").write_text("---\nlicense: [broken\n---\n")
    assert base_license(SimpleNamespace(name=str(tmp_path), revision=None)) == {}
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n")
    assert base_license(SimpleNamespace(name=str(tmp_path), revision=None)) == {"license": "mit"}


def test_text_of_files_is_no_markup() -> None:
    assert (code("rtx3070_8gb"), code("a`b_")) == ("`rtx3070_8gb`", r"a\`b\_")
    assert plain("a|b\n<img> [x](y) `c`") == r"a\|b \<img\> \[x\](y) \`c\`"
