"""Telemetry: rows at log points, from counters that a step only adds to."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hwopt.config.task_kinds import task_facts
from hwopt.testing import tiny_job
from hwopt.training.telemetry.telemetry import Telemetry
from hwopt.training.telemetry.use import Counts

BATCH: Any = SimpleNamespace(rows=4, tokens=10)


def make_run(folder: Path, total_steps: int = 6, **training: Any) -> Any:
    """The part of a run on one CPU rank that telemetry reads."""
    run = SimpleNamespace(
        device=torch.device("cpu"),
        world_size=1,
        is_main=True,
        step=0,
        epoch=0.5,
        total_steps=total_steps,
        training=tiny_job(folder, **({"logging_steps": 2} | training)).job.training,
        progress=SimpleNamespace(peers_lost=False),
        guessed_loss=None,
        task=SimpleNamespace(facts=task_facts("text-classification")),
        engine=SimpleNamespace(norm=torch.tensor(1.0), loss_scale=lambda: None),
        scheduler=SimpleNamespace(base_lrs=[1e-3], lr_lambdas=[lambda step: 1.0], last_epoch=1),
        warnings=[],
    )
    run.warn = run.warnings.append
    return run


def train_step(telemetry: Telemetry, losses: list[float], norm: float = 1.0) -> Any:
    """One step of micro-batches that weigh the same; returns the row that arrived."""
    run: Any = telemetry.run
    run.step += 1
    run.engine.norm = torch.tensor(norm)
    for loss in losses:
        telemetry.add_loss(torch.tensor(loss), SimpleNamespace(loss_weight=1 / len(losses), count=1))
    return telemetry.stepped(BATCH)


def test_row_has_the_mean_of_its_interval_and_arrives_one_step_later(tmp_path: Path) -> None:
    telemetry = Telemetry(make_run(tmp_path))
    assert train_step(telemetry, [1.0, 3.0]) is None
    assert train_step(telemetry, [4.0], norm=2.0) is None
    row = train_step(telemetry, [7.0])
    assert (row["step"], row["loss"], row["grad_norm"], row["learning_rate"]) == (2, 3.0, 2.0, 1e-3)
    assert row["tokens_per_second"] / row["steps_per_second"] == pytest.approx(10)
    assert row["samples_per_second"] / row["steps_per_second"] == pytest.approx(4)
    assert "skipped_updates" not in row
    assert telemetry.flush() is None


def test_last_step_is_a_log_point(tmp_path: Path) -> None:
    telemetry = Telemetry(make_run(tmp_path, total_steps=3))
    rows = [train_step(telemetry, [loss]) for loss in (1.0, 2.0, 5.0)]
    assert [row and row["step"] for row in rows] == [None, None, 2]
    last = telemetry.flush()
    assert (last["step"], last["loss"]) == (3, 5.0)
    assert telemetry.mean_loss() == pytest.approx(8 / 3)
    assert telemetry.total == Counts(3, 12, 30, 0.0)


def test_retried_micro_batches_count_once(tmp_path: Path) -> None:
    telemetry = Telemetry(make_run(tmp_path, logging_steps=1))
    telemetry.add_loss(torch.tensor(100.0), SimpleNamespace(loss_weight=0.5, count=1))
    assert telemetry.mark() == 1
    telemetry.reset_to(0)
    train_step(telemetry, [2.0, 4.0])
    row = telemetry.flush()
    assert row["loss"] == 3.0


def test_non_finite_losses_are_counted_and_left_out_of_the_mean(tmp_path: Path) -> None:
    run = make_run(tmp_path, on_nonfinite="skip", nonfinite_limit=5)
    telemetry = Telemetry(run)
    train_step(telemetry, [2.0, math.nan], norm=math.nan)
    train_step(telemetry, [5.0, 5.0])
    row = telemetry.flush()
    assert row["loss"] == pytest.approx(6 / 1.5)
    assert (row["skipped_updates"], row["nonfinite_losses"]) == (1, 1)
    telemetry.judge()
    assert len(run.warnings) >= 1


def test_paused_time_does_not_count_for_speeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import hwopt.training.telemetry.telemetry as module

    now = [0.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    telemetry = Telemetry(make_run(tmp_path, logging_steps=1))
    with telemetry.paused():
        now[0] += 1000.0
    now[0] += 2.0
    telemetry.waited(0.5)
    train_step(telemetry, [1.0])
    row = telemetry.flush()
    assert (row["steps_per_second"], row["data_wait"], row["time"]) == (0.5, 0.25, 1002.0)


def test_state_restores_the_interval_as_plain_numbers(tmp_path: Path) -> None:
    whole, first = Telemetry(make_run(tmp_path, logging_steps=3)), Telemetry(make_run(tmp_path, logging_steps=3))
    for loss in (1.0, math.nan, 5.0):
        train_step(whole, [loss, 2.0], norm=loss)
    for loss in (1.0, math.nan):
        train_step(first, [loss, 2.0], norm=loss)
    resumed = Telemetry(first.run)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    train_step(resumed, [5.0, 2.0], norm=5.0)
    rows = [telemetry.flush() for telemetry in (whole, resumed)]
    for key in ("step", "loss", "grad_norm", "skipped_updates", "nonfinite_losses"):
        assert rows[0][key] == pytest.approx(rows[1][key], nan_ok=True), key
    assert resumed.total == whole.total


def test_row_of_lost_peers_is_estimated_at_a_log_point_only(tmp_path: Path) -> None:
    run = make_run(tmp_path, logging_steps=2)
    telemetry = Telemetry(run)
    train_step(telemetry, [3.0])
    run.progress.peers_lost = True
    assert telemetry.estimated_row() is None
    run.step += 1
    row = telemetry.estimated_row()
    assert (row["step"], row["loss"]) == (2, 3.0)
