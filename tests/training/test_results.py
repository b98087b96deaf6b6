"""What a classification run writes at its end."""

import json
from pathlib import Path
from typing import Any

import pytest

from hwopt import api
from hwopt.testing import plan_for, rewound, tiny_job, tiny_profile, train_tiny, write_samples


def run_in(folder: Path, **options: Any) -> Path:
    """The folder of a run with test data in `folder`."""
    data = {"test": str(write_samples(folder / "test.jsonl", 15, seed=2))}
    job = tiny_job(folder / "data", data=data, max_steps=6, eval_steps=2, save_steps=1, save_total_limit=0)
    api.execute(plan_for(tiny_profile(), job), folder / "run", cache=folder / "cache", **options)
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_in(tmp_path_factory.mktemp("finished"))


def test_summary_has_the_classes_of_the_best_evaluation_and_of_the_test(finished: Path) -> None:
    summary = json.loads((finished / "run/summary.json").read_text())
    for prefix, samples in (("best_eval_", 12), ("test_", 15)):
        classes = summary[f"{prefix}classes"]
        assert [each["label"] for each in classes] == ["colour", "other"]
        assert sum(each["support"] for each in classes) == samples
        matrix = summary[f"{prefix}confusion_matrix"]
        assert matrix["labels"] == ["colour", "other"]
        assert sum(map(sum, matrix["rows"])) == samples
        f1 = sum(each["f1"] for each in classes) / 2
        assert f1 == pytest.approx(summary["best_eval_f1" if prefix == "best_eval_" else "test_f1"])


def test_further_evaluation_data_is_evaluated_beside_the_first(tmp_path: Path) -> None:
    """The same file under another name has the same metrics; the weights are chosen by a metric of another one."""
    same = str(write_samples(tmp_path / "a.jsonl", 12, seed=1))
    more = {"same": same, "both": [same, str(write_samples(tmp_path / "b.jsonl", 9, seed=3))]}
    job = tiny_job(tmp_path / "data", data={"more_eval": more}, max_steps=4, eval_steps=2, metric_for_best_model="both_loss")
    recorder = train_tiny(plan_for(tiny_profile(), job), tmp_path)
    rows = [row for row in recorder.rows if "eval_loss" in row]
    assert len(rows) == 2
    for row in rows:
        for metric in ("loss", "accuracy", "f1"):
            assert row[f"eval_same_{metric}"] == row[f"eval_{metric}"] != row[f"eval_both_{metric}"]
    best = min(rows, key=lambda row: row["eval_both_loss"])
    assert recorder.summary["best_eval_both_loss"] == best["eval_both_loss"]


def test_details_of_the_best_evaluation_survive_a_resume(finished: Path, tmp_path: Path) -> None:
    before = json.loads((finished / "run/summary.json").read_text())
    rewound(finished / "run", tmp_path / "run", 5)
    (tmp_path / "test.jsonl").write_bytes((finished / "test.jsonl").read_bytes())
    run_in(tmp_path, resume=True)
    after = json.loads((tmp_path / "run/summary.json").read_text())
    names = ("best_step", "best_eval_classes", "best_eval_confusion_matrix", "test_classes")
    assert {name: after[name] for name in names} == {name: before[name] for name in names}
    rows = [line for line in (tmp_path / "run/final/README.md").read_text().splitlines() if line.startswith("| f1 |")]
    assert rows == [f"| f1 | {before['best_eval_f1']:.4f} | {before['test_f1']:.4f} |"]
