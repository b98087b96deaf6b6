"""From a file to predictions, as a user with the command line: init, run, evaluate, predict."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import hwopt

from hwopt.config.job import load_job

GOOD, BAD = ("sehr gut, schöner Käse", "tolles Gerät für Größe 42"), ("schlecht, übler Geruch", "nie wieder, Ärger")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """`hwopt init` proposes a small model with random weights."""
    monkeypatch.setattr("hwopt.planning.inputs.hub_is_out_of_reach", lambda: True)


def said(folder: Path, *arguments: str) -> str:
    """The output of a command that ends with exit code 0."""
    done = hwopt(*arguments, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def train(folder: Path, *settings: str) -> tuple[str, dict[str, Any]]:
    """(output, summary) of a short run of job.toml."""
    words = [word for setting in ("training.max_steps=2", *settings) for word in ("--set", setting)]
    text = said(folder, "run", "job.toml", "--profile", "cpu", "--name", "first", *words)
    return text, json.loads((folder / "runs" / "first" / "summary.json").read_text())


def evaluated(folder: Path, source: str) -> dict[str, Any]:
    return dict(json.loads(said(folder, "evaluate", "runs/first", source, "--format", "json")))


def predicted(folder: Path, source: str, output: str, *options: str) -> list[dict[str, Any]]:
    """The rows that `hwopt predict` writes."""
    said(folder, "predict", "runs/first", source, "-o", output, *options)
    with (folder / output).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file)) if output.endswith(".csv") else list(map(json.loads, file))


def german_rows(number: int) -> Iterator[tuple[str, str, str]]:
    """(comment, verdict, stars) of customers."""
    for row in range(number):
        texts = GOOD if row % 2 else BAD
        yield f"{texts[row % 3 % 2]}, Nr. {row}", "zufrieden" if row % 2 else "verärgert", f"{row % 50 / 10}".replace(".", ",")


def write_german(path: Path, encoding: str) -> list[tuple[str, str, str]]:
    """A file as Excel saves it on a German Windows: semicolons, decimal commas, quotes if needed."""
    rows = list(german_rows(100))
    with path.open("w", encoding=encoding, newline="") as file:
        writer = csv.writer(file, delimiter=";")
        writer.writerow(("Kommentar", "Urteil", "Sterne"))
        writer.writerows(rows)
    return rows


def test_windows_file_is_classified(tmp_path: Path) -> None:
    rows = write_german(tmp_path / "export.csv", "cp1252")
    said(tmp_path, "init", "export.csv", "--yes")
    job = load_job(tmp_path / "job.toml").job
    assert (job.data.text, job.data.label, job.data.encoding) == (("Kommentar",), ("Urteil",), "cp1252")
    text, _ = train(tmp_path)
    assert "WARNING" not in text
    found = evaluated(tmp_path, "export.csv")
    assert (found["samples"], found["skipped_rows"]) == (100, 0)
    assert [each["label"] for each in found["classes"]] == ["verärgert", "zufrieden"]
    out = predicted(tmp_path, "export.csv", "out.csv")
    assert [(row["Kommentar"], row["Urteil"], row["Sterne"]) for row in out] == rows
    assert {row["predicted_label"] for row in out} <= {"zufrieden", "verärgert"}
    assert all(0.5 <= float(row["predicted_probability"]) <= 1 for row in out)


def test_rare_class_is_held_out_in_proportion_and_can_be_weighted(tmp_path: Path) -> None:
    rows = [{"text": f"{'spam offer' if row % 100 == 7 else 'a letter'} {row}", "label": row % 100 == 7} for row in range(900)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    said(tmp_path, "init", "train.jsonl", "--yes")
    text, summary = train(tmp_path)
    assert text.count("imbalanced labels: 'true' has 8 of 810 training samples (1.0%)") == 2  # at the start and at the end
    assert {each["label"]: each["support"] for each in summary["best_eval_classes"]} == {"false": 89, "true": 1}
    weighted = ("--name", "weighted", "--max-steps", "1", "--set", "task.class_weights=balanced")
    said(tmp_path, "run", "job.toml", "--profile", "cpu", *weighted)
    log = (tmp_path / "runs" / "weighted" / "run.log").read_text(encoding="utf-8")
    assert "class weights: 'false' 0.505, 'true' 50.6" in log
    assert "imbalanced" not in log
    assert [each["support"] for each in evaluated(tmp_path, "train.jsonl")["classes"]] == [891, 9]
    assert len(predicted(tmp_path, "train.jsonl", "out.jsonl")) == 900
