"""What a classification run writes and shows at its end."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest

from hwopt import api
from hwopt.report.screen import Screen
from hwopt.report.terminal import Terminal
from hwopt.testing import plan_for, rewound, tiny_job, tiny_profile, train_tiny, write_samples


def run_shown(folder: Path, **options: object) -> str:
    """What the screen shows of a run with test data in `folder`."""
    data = {"test": str(write_samples(folder / "test.jsonl", 15, seed=2))}
    job = tiny_job(folder / "data", data=data, max_steps=6, eval_steps=2, save_steps=1, save_total_limit=0)
    shown = StringIO()
    screen = Screen(Terminal(file=shown, width=200))
    target = folder / "run"
    api.execute(plan_for(tiny_profile(), job), target, screen, cache=folder / "cache", **options)  # type: ignore[arg-type]
    return shown.getvalue()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("finished")
    return folder, run_shown(folder)


def test_summary_has_the_classes_of_the_best_evaluation_and_of_the_test(finished: tuple[Path, str]) -> None:
    folder, _ = finished
    summary = json.loads((folder / "run/summary.json").read_text())
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


def test_the_screen_shows_the_classes_before_the_summary(finished: tuple[Path, str]) -> None:
    _, shown = finished
    lines = [line.split() for line in shown.splitlines()]
    titles = [line[:3] for line in lines if line[-1:] == ["support"]]
    assert titles == [["evaluation,", "best", "weights"], ["test,", "best", "weights"]]
    assert shown.index("support") < shown.index("summary")
    assert "best_eval_classes" not in shown
    assert shown.count("true \\ predicted") == 2


def test_details_of_the_best_evaluation_survive_a_resume(finished: tuple[Path, str], tmp_path: Path) -> None:
    folder, _ = finished
    before = json.loads((folder / "run/summary.json").read_text())
    rewound(folder / "run", tmp_path / "run", 5)
    (tmp_path / "test.jsonl").write_bytes((folder / "test.jsonl").read_bytes())
    run_shown(tmp_path, resume=True)
    after = json.loads((tmp_path / "run/summary.json").read_text())
    names = ("best_step", "best_eval_classes", "best_eval_confusion_matrix", "test_classes")
    assert {name: after[name] for name in names} == {name: before[name] for name in names}
    rows = [line for line in (tmp_path / "run/final/README.md").read_text().splitlines() if line.startswith("| f1 |")]
    assert rows == [f"| f1 | {before['best_eval_f1']:.4f} | {before['test_f1']:.4f} |"]
