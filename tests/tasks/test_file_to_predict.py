"""From a data file to predictions, with what `hwopt init` proposes: a regression CSV, a multi-label JSONL and a CoNLL file."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from documented_folder import write_tasks
from seqeval.metrics import f1_score as entities_f1
from sklearn.metrics import f1_score
from sklearn.preprocessing import MultiLabelBinarizer

from hwopt import api
from hwopt.tasks import proposal as propose
from hwopt.testing import COLOURS


class Case(NamedTuple):
    """A file of `write_tasks`, and what comes of it."""

    name: str
    kind: str
    metric: str
    columns: tuple[str, ...]

    def file(self, folder: Path, part: str) -> str:
        return str(folder / f"{part}{Path(self.name).suffix}")


NAMES = sorted(COLOURS)
CASES = [
    Case("scores.csv", "regression", "pearson", ("predicted_score",)),
    Case(
        "topics.jsonl", "multi-label-classification", "f1_micro", ("predicted_labels", *(f"probability_{name}" for name in NAMES))
    ),
    Case("entities.conll", "token-classification", "f1", ("predicted_tags",)),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.kind)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Case, Path]:
    """A case, and the folder with its files, its job.toml and its run."""
    case: Case = request.param
    folder = tmp_path_factory.mktemp(case.kind)
    for number, (part, rows) in enumerate((("train", 120), ("dev", 40), ("asked", 5))):
        write_tasks(folder, rows, number)
        (folder / case.name).rename(case.file(folder, part))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(propose, "hub_is_out_of_reach", lambda: True)
        data = api.recognise(case.file(folder, "train"))
        assert (data.kind, data.held_out) == (case.kind, {"eval": case.file(folder, "dev")})
        job = folder / "job.toml"
        job.write_text(api.propose(data).text(job))
    # fp32: a pipeline, too, computes in the dtype of the saved weights
    changes = ["training.num_train_epochs=2", "training.learning_rate=3e-3", "plugins.batch.train=16", "data.max_length=32"]
    changes.append("plugins.precision.dtype=fp32")
    plan = api.resolve("cpu", job, assignments=changes, cache=folder / "cache")
    api.execute(plan, folder / "run", cache=folder / "cache")
    return case, folder


def test_file_is_recognised_trained_evaluated_and_predicted(trained: tuple[Case, Path]) -> None:
    case, folder = trained
    held_out = case.file(folder, "dev")
    report = api.evaluate(folder / "run", held_out, cache=folder / "cache")
    assert report.samples == 40
    logged = json.loads((folder / "run" / "summary.json").read_text())
    best = "mse" if case.kind == "regression" else case.metric
    assert logged[f"best_eval_{best}"] == pytest.approx(report.metrics[best], rel=1e-5)
    found = api.predict(folder / "run", held_out, folder / "out.jsonl", cache=folder / "cache")
    assert (found.rows, found.predicted, found.columns) == (40, 40, case.columns)
    rows = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    assert report.metrics[case.metric] == pytest.approx(metric_of(case.kind, rows), abs=1e-4)
    for extension in ("csv", "parquet"):
        assert api.predict(folder / "run", held_out, folder / f"out.{extension}", cache=folder / "cache").predicted == 40


def metric_of(kind: str, rows: list[dict[str, Any]]) -> float:
    """The metric of the predictions in `rows`, by another library where there is one."""
    if kind == "regression":
        return float(np.corrcoef([float(row["score"]) for row in rows], [row["predicted_score"] for row in rows])[0, 1])
    if kind == "multi-label-classification":
        for row in rows:
            probable = {name for name in NAMES if row[f"probability_{name}"] >= 0.5}
            assert probable == set(row["predicted_labels"])
        sets = MultiLabelBinarizer(classes=NAMES)
        truth, predicted = (sets.fit_transform([row[key] for row in rows]) for key in ("labels", "predicted_labels"))
        return float(f1_score(truth, predicted, average="micro", zero_division=0))
    assert [len(row["tokens"]) for row in rows] == [len(row["predicted_tags"]) for row in rows]
    truth, predicted = ([row[key] for row in rows] for key in ("tags", "predicted_tags"))
    return float(entities_f1(truth, predicted, zero_division=0))


def test_truncated_rows_are_predicted_and_words_behind_the_end_have_no_tag(trained: tuple[Case, Path]) -> None:
    case, folder = trained
    source = case.file(folder, "dev")
    found = api.predict(folder / "run", source, folder / "cut.jsonl", assignments=["data.max_length=5"], cache=folder / "cache")
    assert found.predicted == 40
    rows = [json.loads(line) for line in (folder / "cut.jsonl").read_text().splitlines()]
    for row in rows if case.kind == "token-classification" else []:
        assert [tag is None for tag in row["predicted_tags"]] == [number >= 3 for number in range(len(row["tokens"]))]


def test_saved_model_opens_in_the_pipeline_that_its_card_names(trained: tuple[Case, Path]) -> None:
    from transformers import pipeline

    case, folder = trained
    final = folder / "run" / "final"
    card = (final / "README.md").read_text()
    tag = "token-classification" if case.kind == "token-classification" else "text-classification"
    assert f"pipeline_tag: {tag}" in card
    model = pipeline(tag, model=str(final), device="cpu")
    api.predict(folder / "run", case.file(folder, "asked"), folder / "answers.jsonl", cache=folder / "cache")
    for row in (json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()):
        if case.kind == "token-classification":
            answer = model(" ".join(row["tokens"]), ignore_labels=[])
            assert [each["entity"] for each in answer] == row["predicted_tags"]
        elif case.kind == "multi-label-classification":
            scores = {f"probability_{each['label']}": each["score"] for each in model(row["text"], top_k=None)}
            assert scores == pytest.approx({name: row[name] for name in scores}, abs=1e-4)
            assert len(scores) == 3
        else:
            (answer,) = model(row["text"])
            assert answer == {"label": "score", "score": pytest.approx(row["predicted_score"], abs=1e-4)}


def test_preview_shows_the_labels_of_a_sample(trained: tuple[Case, Path]) -> None:
    case, folder = trained
    found = api.preview("cpu", folder / "job.toml", cache=folder / "cache")
    if case.kind == "token-classification":
        assert found.tokens_in_loss == sum(span.in_loss for span in found.spans)
        first = Path(case.file(folder, "train")).read_text().split("\n\n")[0].splitlines()
        assert "".join(span.text for span in found.spans).split() == ["[CLS]", *(line.split()[0] for line in first), "[SEP]"]
        return
    assert found.label.startswith("score 0") or set(found.label.split(", ")) <= {*NAMES, "(none)"}
