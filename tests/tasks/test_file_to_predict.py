"""From a data file to predictions, with what `hwopt init` proposes: a regression CSV, a multi-label JSONL and a CoNLL file."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from seqeval.metrics import f1_score as entities_f1
from sklearn.metrics import f1_score
from sklearn.preprocessing import MultiLabelBinarizer

from hwopt import api
from hwopt.tasks import proposal as propose

WORDS = ("red", "green", "blue", "one", "two", "three", "hot", "cold", "up", "down", "left", "right")


def write_regression(path: Path, rows: int, seed: int) -> None:
    """The score is the share of colours in the text."""
    draw = random.Random(seed)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "score"])
        for _ in range(rows):
            words = draw.choices(WORDS, k=draw.randint(4, 9))
            writer.writerow([" ".join(words), sum(word in WORDS[:3] for word in words) / len(words)])


def write_label_sets(path: Path, rows: int, seed: int) -> None:
    """A text has a label for each group of words that it has."""
    draw = random.Random(seed)
    groups = {"colour": WORDS[:3], "number": WORDS[3:6], "heat": WORDS[6:8]}
    with path.open("w") as file:
        for _ in range(rows):
            words = draw.choices(WORDS, k=draw.randint(4, 9))
            labels = [name for name, group in groups.items() if set(group) & set(words)]
            file.write(json.dumps({"text": " ".join(words), "labels": labels}) + "\n")


def write_conll(path: Path, rows: int, seed: int) -> None:
    """Colours begin an entity, and numbers directly behind them continue it."""
    draw = random.Random(seed)
    lines = ["-DOCSTART- -X- O", ""]
    for _ in range(rows):
        last = "O"
        for word in draw.choices(WORDS, k=draw.randint(4, 9)):
            last = "B-COL" if word in WORDS[:3] else "I-COL" if word in WORDS[3:6] and last != "O" else "O"
            lines.append(f"{word} X {last}")
        lines.append("")
    path.write_text("\n".join(lines))


class Case(NamedTuple):
    """A kind of file, and what comes of it."""

    name: str
    write: Callable[[Path, int, int], None]
    kind: str
    metric: str
    columns: tuple[str, ...]


CASES = [
    Case("train.csv", write_regression, "regression", "pearson", ("predicted_score",)),
    Case(
        "train.jsonl",
        write_label_sets,
        "multi-label-classification",
        "f1_micro",
        ("predicted_labels", "probability_colour", "probability_heat", "probability_number"),
    ),
    Case("train.conll", write_conll, "token-classification", "f1", ("predicted_tags",)),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.kind)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Case, Path]:
    """A case, and the folder with its files, its job.toml and its run."""
    case: Case = request.param
    tmp_path = tmp_path_factory.mktemp(case.kind)
    case.write(tmp_path / case.name, 300, 0)
    held_out = case.name.replace("train", "dev")
    case.write(tmp_path / held_out, 60, 1)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(propose, "hub_is_out_of_reach", lambda: True)
        data = api.recognise(str(tmp_path / case.name))
        assert (data.kind, data.held_out) == (case.kind, {"eval": str(tmp_path / held_out)})
        job = tmp_path / "job.toml"
        job.write_text(api.propose(data).text(job))
    # fp32: a pipeline, too, computes in the dtype of the saved weights
    changes = ["training.num_train_epochs=4", "training.learning_rate=3e-3", "plugins.batch.train=16", "data.max_length=32"]
    changes.append("plugins.precision.dtype=fp32")
    plan = api.resolve("cpu", job, assignments=changes, cache=tmp_path / "cache")
    api.execute(plan, tmp_path / "run", cache=tmp_path / "cache")
    return case, tmp_path


def test_file_is_recognised_trained_evaluated_and_predicted(trained: tuple[Case, Path]) -> None:
    case, folder = trained
    held_out = str(folder / case.name.replace("train", "dev"))
    report = api.evaluate(folder / "run", held_out, cache=folder / "cache")
    assert report.samples == 60
    logged = json.loads((folder / "run" / "summary.json").read_text())
    best = "mse" if case.kind == "regression" else case.metric
    assert logged[f"best_eval_{best}"] == pytest.approx(report.metrics[best], rel=1e-5)
    found = api.predict(folder / "run", held_out, folder / "out.jsonl", cache=folder / "cache")
    assert (found.rows, found.predicted, found.columns) == (60, 60, case.columns)
    rows = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    assert report.metrics[case.metric] == pytest.approx(metric_of(case.kind, rows), abs=1e-4)
    for extension in ("csv", "parquet"):
        assert api.predict(folder / "run", held_out, folder / f"out.{extension}", cache=folder / "cache").predicted == 60


def metric_of(kind: str, rows: list[dict[str, Any]]) -> float:
    """The metric of the predictions in `rows`, by another library where there is one."""
    if kind == "regression":
        return float(np.corrcoef([float(row["score"]) for row in rows], [row["predicted_score"] for row in rows])[0, 1])
    if kind == "multi-label-classification":
        for row in rows:
            probable = {name for name in ("colour", "heat", "number") if row[f"probability_{name}"] >= 0.5}
            assert probable == set(row["predicted_labels"])
        sets = MultiLabelBinarizer(classes=["colour", "heat", "number"])
        truth, predicted = (sets.fit_transform([row[key] for row in rows]) for key in ("labels", "predicted_labels"))
        return float(f1_score(truth, predicted, average="micro", zero_division=0))
    assert [len(row["tokens"]) for row in rows] == [len(row["predicted_tags"]) for row in rows]
    truth, predicted = ([row[key] for row in rows] for key in ("tags", "predicted_tags"))
    return float(entities_f1(truth, predicted, zero_division=0))


def test_truncated_rows_are_predicted_and_words_behind_the_end_have_no_tag(trained: tuple[Case, Path]) -> None:
    case, folder = trained
    source, changed = str(folder / case.name.replace("train", "dev")), ["data.max_length=5"]
    found = api.predict(folder / "run", source, folder / "cut.jsonl", assignments=changed, cache=folder / "cache")
    assert found.predicted == 60
    rows = [json.loads(line) for line in (folder / "cut.jsonl").read_text().splitlines()]
    for row in rows if case.kind == "token-classification" else []:
        assert len(row["predicted_tags"]) == len(row["tokens"])
        assert None not in row["predicted_tags"][:1]
        assert set(row["predicted_tags"][3:]) == {None}


def test_saved_model_opens_in_the_pipeline_that_its_card_names(trained: tuple[Case, Path]) -> None:
    from transformers import pipeline

    case, folder = trained
    final = folder / "run" / "final"
    card = (final / "README.md").read_text()
    tag = "token-classification" if case.kind == "token-classification" else "text-classification"
    assert f"pipeline_tag: {tag}" in card
    model = pipeline(tag, model=str(final), device="cpu")
    asked = folder / f"asked{Path(case.name).suffix}"
    case.write(asked, 5, 2)
    api.predict(folder / "run", str(asked), folder / "answers.jsonl", cache=folder / "cache")
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
        assert "".join(span.text for span in found.spans) == "[CLS] down three one hot two down one [SEP] "
        return
    assert found.label is not None
    assert found.label.startswith("score 0") or set(found.label.split(", ")) <= {"colour", "number", "heat"}
