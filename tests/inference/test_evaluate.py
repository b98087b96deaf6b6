"""hwopt evaluate: the metrics of a run's model on a file."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from hwopt import api
from hwopt.cli import run_command
from hwopt.config.job import make_job
from hwopt.config.toml import Document
from hwopt.errors import DataError, InputError
from hwopt.testing import plan_for, tiny_job, tiny_profile, train_tiny, write_samples


def best_metrics(run: Path) -> dict[str, float]:
    """The metrics of the best evaluation of a run."""
    summary = json.loads((run / "summary.json").read_text())
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (best,) = [row for row in rows if "eval_loss" in row and row["step"] == summary["best_step"]]
    return {name.removeprefix("eval_"): value for name, value in best.items() if name.startswith("eval_")}


@pytest.mark.parametrize("kind", ["classifier", "generator"])
def test_metrics_are_those_of_the_run(kind: str, request: pytest.FixtureRequest) -> None:
    run = request.getfixturevalue(kind)
    source = run.parent / ("data/eval.jsonl" if kind == "classifier" else "eval.jsonl")
    report = api.evaluate(run, str(source))
    expected = best_metrics(run)
    assert report.metrics.keys() == expected.keys() - {"runtime", "samples_per_second"}
    assert report.metrics == pytest.approx({name: expected[name] for name in report.metrics}, rel=2e-3)
    summary = json.loads((run / "summary.json").read_text())
    assert report.details == {name: summary[f"best_eval_{name}"] for name in report.details}
    assert bool(report.details) == (kind == "classifier")
    again = api.evaluate(run / "final", str(source), batch_size=1)
    assert again.metrics == pytest.approx(report.metrics, rel=5e-3)


def test_split_is_the_one_that_is_asked_for_and_named_by_default(classifier: Path, tmp_path: Path) -> None:
    import datasets

    rows = [json.loads(line) for line in (classifier.parent / "data/eval.jsonl").read_text().splitlines()]
    parts = {"train": rows, "test": rows[:5]}
    saved = str(tmp_path / "saved")
    datasets.DatasetDict({name: datasets.Dataset.from_list(part) for name, part in parts.items()}).save_to_disk(saved)
    whole, test = (api.evaluate(classifier, saved, assignments=given) for given in ([], ["data.split=test"]))
    assert (whole.samples, test.samples) == (12, 5)
    assert ["its split 'train' is read" in note for note in whole.notes] == [True]
    assert not test.notes
    report = api.predict(classifier, saved, tmp_path / "out.csv", assignments=["data.split=test"])
    assert (report.rows, report.notes) == (5, ())


def test_json_and_table(classifier: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = str(classifier.parent / "data/eval.jsonl")
    assert run_command(["evaluate", str(classifier), source, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["samples"] == 12
    assert found["classes"][0].keys() == {"label", "precision", "recall", "f1", "support"}
    assert run_command(["evaluate", str(classifier), source]) == 0
    said = capsys.readouterr().out
    assert f"{found['f1']:.4f}" in said
    assert "true \\ predicted  colour  other" in said


def test_rows_are_skipped_by_the_rules_of_training(classifier: Path, tmp_path: Path) -> None:
    source = write_samples(tmp_path / "in.jsonl", 60, seed=4)
    with source.open("a") as file:
        file.write(json.dumps({"text": "red", "label": "unknown"}) + "\n")
    report = api.evaluate(classifier, str(source))
    assert (report.samples, report.skipped) == (60, 1)
    assert "has a label that is not in the training data" in report.notes[0]
    with source.open("a") as file:
        file.write((json.dumps({"text": "", "label": "other"}) + "\n") * 6)
    with pytest.raises(DataError, match="more than 5%"):
        api.evaluate(classifier, str(source))


def test_out_of_memory_halves_the_batch_and_counts_each_row_once(classifier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hwopt.tasks.text_classification import TextClassification

    source, warnings = str(classifier.parent / "data/eval.jsonl"), []
    expected = api.evaluate(classifier, source)
    loss = TextClassification.loss

    def limited(self, outputs, targets):
        if len(targets) > 2:
            raise torch.OutOfMemoryError("8 GiB")
        return loss(self, outputs, targets)

    monkeypatch.setattr(TextClassification, "loss", limited)
    found = api.evaluate(classifier, source, warn=warnings.append)
    assert found.details == expected.details
    assert len(warnings) == 2


@pytest.mark.parametrize("tables", [{}, {"adapter": {"always": True}}, {"precision": {"dtype": "bf16", "level": "O2"}}])
def test_a_checkpoint_is_evaluated_as_the_run_evaluated_it(tables: dict[str, Any], tmp_path: Path) -> None:
    job = tiny_job(tmp_path / "data", max_steps=1)
    train_tiny(plan_for(tiny_profile(), job), tmp_path / "base")
    settings = {"max_steps": 4, "eval_steps": 2, "save_steps": 2, "learning_rate": 3e-2}
    model = {"name": str(tmp_path / "base/run/final")}
    tuned = make_job(Document("tuned", job.document.data | {"model": model, "training": settings}))
    recorder = train_tiny(plan_for(tiny_profile(**tables), tuned), tmp_path / "tuned")
    run, source = tmp_path / "tuned/run", str(tmp_path / "data/eval.jsonl")
    (expected,) = [row["eval_loss"] for row in recorder.rows if row.get("step") == 2 and "eval_loss" in row]
    assert api.evaluate(run / "checkpoint-2", source).metrics["loss"] == pytest.approx(expected, rel=2e-3)
    shutil.rmtree(run / "final")
    with pytest.raises(InputError, match=r"it has no final/.* or give its newest checkpoint: .*checkpoint-\d"):
        api.evaluate(run, source)
