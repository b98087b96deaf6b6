"""The task of examples/tasks, installed through its entry point: from a file to predictions."""

import json
import random
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from installed_task import installed

from hwopt import api
from hwopt.errors import DataError, InputError
from hwopt.planning.schema import schema
from hwopt.tasks import proposal as propose
from hwopt.testing import WORDS

FOLDER = Path(__file__).parents[2] / "examples" / "tasks"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with train.jsonl and dev.jsonl, in which the entry points of the example are installed."""
    declared = tomllib.loads((FOLDER / "pyproject.toml").read_text())["project"]["entry-points"]["hwopt.tasks"]
    (tmp_path / "site").mkdir()
    monkeypatch.setattr(propose, "hub_is_out_of_reach", lambda: True)
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "train.jsonl", 200, 0)
    write(tmp_path / "dev.jsonl", 40, 1)
    with installed(tmp_path / "site", monkeypatch, FOLDER / "sentence_similarity.py", **declared):
        yield tmp_path


def write(path: Path, rows: int, seed: int, scale: float = 1) -> None:
    """The similarity is 1 if the texts begin with the same word, else 0."""
    draw = random.Random(seed)
    with path.open("w") as file:
        for _ in range(rows):
            first, second = (draw.choices(WORDS[:4], k=3) for _ in range(2))
            same = scale * (first[0] == second[0])
            file.write(json.dumps({"sentence1": " ".join(first), "sentence2": " ".join(second), "similarity": same}) + "\n")


def test_example_task_is_proposed_trained_evaluated_and_predicted(folder: Path) -> None:
    found = api.recognise("train.jsonl")
    assert (found.kind, found.keys["text"]) == ("sentence-similarity", ["sentence1", "sentence2"])
    assert "sentence-similarity" in schema("job")["$defs"]["TaskOptions"]["properties"]["kind"]["enum"]
    Path("job.toml").write_text(api.propose(found).text(Path("job.toml")))
    plan = api.resolve("cpu", "job.toml", assignments=["training.max_steps=3"], cache=folder / "cache")
    assert api.with_memory(plan, lambda _: plan, cache=folder / "cache").memory is not None
    api.execute(plan, folder / "run", cache=folder / "cache")
    report = api.evaluate("run", "dev.jsonl", cache=folder / "cache")
    assert report.samples == 40
    assert report.metrics["loss"] > report.metrics["mse"], "a cross-entropy"
    written = api.predict("run", "dev.jsonl", "out.jsonl", cache=folder / "cache")
    assert (written.predicted, written.columns) == (40, ("predicted_similarity",))
    scores = [json.loads(line)["predicted_similarity"] for line in Path("out.jsonl").read_text().splitlines()]
    truth = [json.loads(line)["similarity"] for line in Path("out.jsonl").read_text().splitlines()]
    assert all(0 < score < 1 for score in scores)
    errors = [(score - own) ** 2 for score, own in zip(scores, truth, strict=True)]
    assert sum(errors) / 40 == pytest.approx(report.metrics["mse"], rel=1e-4)


def test_example_task_refuses_what_it_cannot_train(folder: Path) -> None:
    config = "{ model_type = 'bert', hidden_size = 32, num_hidden_layers = 1, num_attention_heads = 2, intermediate_size = 64 }"
    job = (
        f"[model]\nconfig = {config}\n[data]\ntrain = 'train.jsonl'\nlabel = 'similarity'\n[task]\nkind = 'sentence-similarity'\n"
    )
    Path("job.toml").write_text(job)
    with pytest.raises(InputError, match="sentence-similarity takes two columns in data.text"):
        api.resolve("cpu", "job.toml", cache=folder / "cache")
    write(folder / "train.jsonl", 20, 0, scale=5)
    with pytest.raises(DataError, match=r"the score 5 is not between 0 and 1"):
        api.preview("cpu", "job.toml", assignments=["data.text=['sentence1', 'sentence2']"], cache=folder / "cache")
