"""Early stopping: decides as transformers does, and stops at the same step after a resume."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import EarlyStoppingCallback

from hwopt import api
from hwopt.errors import InputError
from hwopt.planning.plan import Plan
from hwopt.testing import Recorder, plan_for, rewound, saved_bits, tiny_job, tiny_profile, train_tiny
from hwopt.training.evaluation import EarlyStopping


def stopping(patience: int, threshold: float, greater: bool) -> EarlyStopping:
    settings = SimpleNamespace(early_stopping_patience=patience, early_stopping_threshold=threshold)
    best: Any = SimpleNamespace(value=None, sign=1.0 if greater else -1.0, metric="eval_f1", step=0)
    run: Any = SimpleNamespace(training=settings, step=1, total_steps=9)
    return EarlyStopping(run, best)


@given(
    values=st.lists(st.sampled_from([0.1, 0.2, 0.25, 0.3, 0.9, -0.5]), min_size=1, max_size=12),
    patience=st.integers(1, 4),
    threshold=st.sampled_from([0.0, 0.06, 0.5]),
    greater=st.booleans(),
)
def test_decisions_are_those_of_transformers(values: list[float], patience: int, threshold: float, greater: bool) -> None:
    ours, theirs = stopping(patience, threshold, greater), EarlyStoppingCallback(patience, threshold)
    arguments = SimpleNamespace(greater_is_better=greater, metric_for_best_model="eval_f1")
    state, control = SimpleNamespace(best_metric=None), SimpleNamespace(should_training_stop=False)
    for value in values:
        ours.observe(value)
        theirs.on_evaluate(arguments, state, control, {"eval_f1": value})  # before the Trainer updates the best metric
        assert ours.count == theirs.early_stopping_patience_counter
        assert ours.stops == (theirs.early_stopping_patience_counter >= patience)
        if state.best_metric is None or (value > state.best_metric if greater else value < state.best_metric):
            state.best_metric = ours.best.value = value


def test_a_metric_that_is_not_finite_is_no_improvement() -> None:
    ours = stopping(2, 0.0, greater=False)
    for value, count in ((float("nan"), 0), (float("nan"), 1), (0.5, 0), (float("nan"), 1), (float("inf"), 2)):
        ours.observe(value)
        assert ours.count == count
        if ours.best.value is None or ours.best.value != ours.best.value:
            ours.best.value = value
    assert ours.stops


def make_plan(folder: Path, patience: int = 2) -> Plan:
    """A run whose evaluation loss improves once at most: its threshold is larger than any later improvement."""
    stopping = {"metric_for_best_model": "eval_loss", "early_stopping_threshold": 5.0, "early_stopping_patience": patience}
    job = tiny_job(folder / "data", max_steps=12, eval_steps=2, save_steps=1, save_total_limit=0, **stopping)
    return plan_for(tiny_profile(), job)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Recorder]:
    """A run that stopped after its third evaluation, in step 6 of 12."""
    folder = tmp_path_factory.mktemp("stopped")
    return folder / "run", train_tiny(make_plan(folder), folder)


def test_a_run_stops_after_evaluations_without_improvement(stopped: tuple[Path, Recorder]) -> None:
    run, recorder = stopped
    summary = json.loads((run / "summary.json").read_text())
    assert [row["step"] for row in recorder.rows if "eval_loss" in row] == [2, 4, 6]
    assert (summary["step"], summary["early_stopping_count"]) == (6, 2)
    assert json.loads((run / "status.json").read_text()) == {"exit_code": 0, "message": "done"}
    log = "\n".join(recorder.messages)
    assert "Stopping early after step 6 of 12: eval_loss did not improve by more than 5 in 2 evaluations" in log
    assert f"The best weights are those of step {summary['best_step']}" in log


@pytest.mark.parametrize("step", [3, 6])
def test_a_resumed_run_stops_at_the_same_step(step: int, stopped: tuple[Path, Recorder], tmp_path: Path) -> None:
    """Step 6 is that of a process killed between the decision and final/."""
    folder, _ = stopped
    run = rewound(folder, tmp_path / "run", step)
    plan, recorder = make_plan(folder.parent), Recorder()
    summary = api.execute(plan, run, recorder, cache=tmp_path / "cache", resume=True)
    assert (summary["step"], summary["early_stopping_count"]) == (6, 2)
    assert saved_bits(run / "final") == saved_bits(folder / "final")


def test_resume_of_a_stopped_run_is_complete_unless_patience_grows(stopped: tuple[Path, Recorder], tmp_path: Path) -> None:
    folder, _ = stopped
    run = rewound(folder, tmp_path / "run", 12)
    (run / "summary.json").unlink(missing_ok=True)
    shutil.copytree(folder / "final", run / "final")
    shutil.copy(folder / "summary.json", run)
    recorder = Recorder()
    assert api.execute(make_plan(folder.parent), run, recorder, cache=tmp_path / "cache", resume=True)["step"] == 6
    assert recorder.rows == []
    longer = api.execute(make_plan(folder.parent, patience=3), run, recorder, cache=tmp_path / "cache", resume=True)
    assert longer["step"] == 8
    assert any("early_stopping_patience was 2 and is 3" in warning for warning in recorder.warnings)


def test_early_stopping_needs_evaluation_data(tmp_path: Path) -> None:
    job = tiny_job(tmp_path / "data", early_stopping_patience=1, data={"eval": None})
    with pytest.raises(InputError, match=r"early_stopping_patience: needs evaluation data: set data\.eval"):
        train_tiny(plan_for(tiny_profile(), job), tmp_path)
    assert not (tmp_path / "run").exists()
