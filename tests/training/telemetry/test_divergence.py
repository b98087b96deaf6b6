"""Divergence: loss spikes, and limits of skipped updates."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwopt.config.job_training import Training
from hwopt.errors import NonFiniteError
from hwopt.testing import plan_for, tiny_job, tiny_profile, train_tiny
from hwopt.training.telemetry.divergence import DivergenceMonitor, LoggedInterval, LossHistory


@given(st.integers(0, 2**32), st.integers(1, 15), st.floats(2.0, 50.0))
def test_long_spike_is_reported_once(seed: int, length: int, height: float) -> None:
    noise = random.Random(seed)
    history = LossHistory()
    calm = [2.0 * 0.99**step * (1 + noise.uniform(-0.05, 0.05)) for step in range(60)]
    assert not any(history.spike_starts(loss) for loss in calm), "noise is not a spike"
    assert [history.spike_starts(calm[-1] + height) for _ in range(length)] == [True] + [False] * (length - 1)
    assert not any(history.spike_starts(loss) for loss in calm[-10:])
    assert history.spike_starts(calm[-1] + height), "a second spike"


def test_loss_that_stays_high_becomes_the_new_level() -> None:
    history = LossHistory()
    jumps = [history.spike_starts(loss) for loss in [1.0] * 10 + [5.0] * 60 + [30.0]]
    assert [number for number, jumped in enumerate(jumps) if jumped] == [10, 70]
    history = LossHistory()
    assert not any(history.spike_starts(loss) for loss in [9.0, 0.1, 50.0, 0.1]), "too few log points"


def observe(
    monitor: DivergenceMonitor, step: int, norms: list[float], training: dict[str, Any] | None = None, **given: Any
) -> tuple[list[str], NonFiniteError | None]:
    return monitor.observe(Training(**training or {}), 1_000, LoggedInterval(step, norms, loss=1.0, **given))


def test_loss_scaler_may_skip_overflowing_updates_within_the_limit() -> None:
    nan, monitor = float("nan"), DivergenceMonitor()
    assert observe(monitor, 10, [nan] * 10, scale=64.0) == ([], None)
    assert observe(monitor, 50, [nan] * 40, scale=64.0) == ([], None)
    _, error = observe(monitor, 51, [nan], scale=64.0)
    assert "51 updates in a row were not finite up to step 51" in str(error)
    _, error = observe(DivergenceMonitor(), 1, [1.0], scale=0.5)
    assert "loss scale 0.5" in str(error)
    _, error = observe(DivergenceMonitor(), 1, [nan], scale=64.0, nonfinite_losses=1)
    assert "the loss was not finite at or before step 1" in str(error)
    messages, error = observe(DivergenceMonitor(), 1, [nan], scale=64.0, nonfinite_losses=1, training={"on_nonfinite": "skip"})
    assert error is None
    assert "the loss of 1 micro-batch(es) was not finite" in messages[0]


def test_state_survives_json() -> None:
    monitor, resumed = DivergenceMonitor(2, 1, 3, LossHistory([2.0, 1.5], 2.0, 4), True), DivergenceMonitor()
    resumed.load_state_dict(json.loads(json.dumps(monitor.state_dict())))
    assert resumed == monitor


@pytest.mark.parametrize("follows", ["warn", "stop", "off"])
def test_loss_spike_option_warns_stops_or_ignores(follows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The learning rate is so high at steps 7 and 8 that the loss rises."""
    import hwopt.training.optimizer

    monkeypatch.setattr(hwopt.training.optimizer, "make_scheduler", spiking_schedule)
    job = tiny_job(tmp_path / "data", max_steps=12, loss_spike=follows, max_grad_norm=0)
    plan = plan_for(tiny_profile(), job)
    if follows == "stop":
        with pytest.raises(NonFiniteError, match=r"the loss rose to [\d.e+]+ at step \d+; the median of .*diverged"):
            train_tiny(plan, tmp_path)
        return
    recorder = train_tiny(plan, tmp_path)
    assert sum("the loss rose to" in line for line in recorder.warnings) == (1 if follows == "warn" else 0), recorder.losses


def test_loss_far_above_a_guess_warns_at_the_first_log_point_after_the_warm_up() -> None:
    monitor, training = DivergenceMonitor(), Training()
    found = [
        monitor.observe(training, 100, LoggedInterval(step, [1.0], loss, guess=guess))
        for step, loss, guess in [(1, 25.0, None), (2, 11.0, 5.66), (3, 25.0, 5.66), (4, 30.0, 5.66)]
    ]
    assert [len(warnings) for warnings, _ in found] == [0, 0, 1, 0]
    assert "the loss is 25 at step 3; a model that gives every label the same probability has 5.66" in found[2][0][0]
    off = DivergenceMonitor().observe(Training(loss_spike="off"), 100, LoggedInterval(3, [1.0], 25.0, guess=5.66))
    assert off == ([], None)


def spiking_schedule(run: Any) -> Any:
    import torch

    return torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: 3e3 if 6 <= step <= 7 else 1e-3)
