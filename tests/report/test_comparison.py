"""Runs side by side: their figures, what differs, and whether they are ones of the same job."""

from pathlib import Path
from typing import Any

import pytest
from report.printed import printed
from report.run_folders import MEMORY, PLAN, PROCESS, changed, eval_row, log_rows, record_of

from hwopt.report.comparison import (
    differences,
    figures,
    job_differences,
    plans_to_dict,
    predicted_ratio,
    runs_to_dict,
    show_plans,
    show_runs,
)


def rows_of(speed: float, seed: int = 0, f1: float = 0.5) -> list[dict[str, Any]]:
    return [*log_rows(20, speed, seed=seed), eval_row(50, loss=1.0, f1=f1), eval_row(100, loss=1.2, f1=f1 - 0.1)]


def test_figures_of_a_run(tmp_path: Path) -> None:
    rows = [row | {"gpu_utilization": 90.0} for row in log_rows(20, noise=0.0)]
    found = figures(record_of(tmp_path / "run", [*rows, eval_row(50, loss=1.0, f1=0.5), eval_row(100, loss=1.2, f1=0.4)]))
    assert found["seconds_per_epoch"] == pytest.approx(8.0), "50 steps of 16 rows at 100 rows/s; the first interval is left out"
    assert found["samples_per_second"] == pytest.approx(100.0)
    assert found["tokens_per_second"] == pytest.approx(2000.0)
    assert found["gpu_use_percent"] == 90.0
    assert found["best"] == {"loss": {"value": 1.0, "step": 50}, "f1": {"value": 0.5, "step": 50}}


def test_differences_are_keys_as_set_takes_them() -> None:
    other = changed(PLAN, training__seed=7)
    other["plugins"][1] = changed(other["plugins"][1], decision="apply")
    assert differences([PLAN, other]) == {
        "training.seed": [42, 7],
        "plugins.tf32": ["skipped", "on"],
        "plugins.tf32.enabled": [None, True],
    }
    assert differences([PLAN, PLAN]) == {}


def test_job_differs_by_model_data_or_task(tmp_path: Path) -> None:
    def others(name: str, plan: dict[str, Any], process: dict[str, Any] = PROCESS) -> list[str]:
        first = record_of(tmp_path / f"{name}-a", rows_of(100))
        return job_differences([first, record_of(tmp_path / f"{name}-b", rows_of(100), plan=plan, processes=[process])])

    assert others("seed", changed(PLAN, training__seed=7)) == []
    assert others("model", changed(PLAN, job__model__name="bert-base-uncased")) == ["model.name"]
    assert others("path", changed(PLAN, job__data__train="copy.jsonl")) == [], "the same samples from another file"
    changed_data = changed(PROCESS, data__eval="xyz")
    assert others("content", PLAN, changed_data) == ["the samples of data.eval"], "other samples from the same file"
    earlier = {key: value for key, value in PROCESS.items() if key != "data"}
    assert others("unknown", changed(PLAN, job__data__train="copy.jsonl"), earlier) == ["data.train"]


def test_screen_has_figures_ratio_and_differences(tmp_path: Path) -> None:
    records = [
        record_of(tmp_path / "rtx3070_8gb_batch32", rows_of(100)),
        record_of(tmp_path / "rtx3070_8gb_batch96", rows_of(150, 1), plan=changed(PLAN, training__learning_rate=2e-3)),
        record_of(tmp_path / "rtx3070_8gb_experimental", rows_of(75, 2)),
    ]
    text = printed(lambda console: show_runs(console, records), 80)
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "samples/s\n" in text, "a narrow terminal gets blocks of lines"
    for part in ("_batch96 against rtx3070_8gb_batch32: 1.5", "the same samples in each", "training.learning_rate", "0.002"):
        assert part in text.replace("\n", " "), part


def test_json_has_figures_ratios_and_differences(tmp_path: Path) -> None:
    records = [record_of(tmp_path / "a", rows_of(100)), record_of(tmp_path / "b", rows_of(200, 1))]
    found = runs_to_dict(records)
    assert [run["folder"] for run in found["runs"]] == [str(tmp_path / "a"), str(tmp_path / "b")]
    ratio = found["ratios"][0]["samples_per_second_ratio"]
    assert ratio["value"] == pytest.approx(2.0, rel=0.02)
    assert ratio["low"] < ratio["value"] < ratio["high"]
    assert (ratio["windows"], ratio["paired"], ratio["clear"]) == (19, True, True)
    assert found["different_job"] == found["differences"] == []


def test_plans_are_compared_by_their_predictions() -> None:
    slow = PLAN | {"memory": MEMORY, "profile": "slow"}
    fast = changed(slow, profile="fast", memory__time__step=[0.05, 0.15])
    assert predicted_ratio(fast, slow) == pytest.approx((4 / 3, 2.0))
    assert plans_to_dict([slow, fast])["ratios"] == [{"profile": "fast", "samples_per_second_ratio": pytest.approx((4 / 3, 2.0))}]
    both = printed(lambda console: show_plans(console, [slow, fast]))
    assert "fast against slow: 1.33 to 2.00 times the samples/s (estimated from the card's peak speeds)" in both
    assert "10 to 20 s" in both
    other = changed(slow, batch__step=100, memory__time__step=[0.08, 1.2])
    assert "83.3 to 1,250" in printed(lambda console: show_plans(console, [other]))
    without = changed(slow, memory__time=None)
    assert predicted_ratio(without, slow) is None
    printed(lambda console: show_plans(console, [slow, without]))
