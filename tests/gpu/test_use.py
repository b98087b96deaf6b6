"""How well a run uses a CUDA device: what is measured, and the verdict on a model that is too small for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hwopt.testing import plan_for, tiny_job, tiny_profile, train_tiny
from hwopt.training import step_timer, use

MEASURED = {"gpu_percent", "memory_busy_percent", "memory_gib", "power_watts", "temperature_celsius", "clock_mhz", "cpu_percent"}
TIMED = {"host_ms_per_micro_batch", "device_ms_per_micro_batch", "device_waits_share", "forward_share", "update_share"}


@pytest.mark.device("pretend")
def test_a_tiny_model_is_host_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pretend card is never busy, as a fast card with a tiny model: all that is left is the host's time."""
    monkeypatch.setattr(use, "ENOUGH_SECONDS", 0.0)
    monkeypatch.setattr(step_timer, "PERIOD", 0.0)
    monkeypatch.setattr("hwopt.training.verdict.DATA_WAIT", 1.1)  # the tiny data is prepared by the training process
    profile = tiny_profile(dataloader={"num_workers": 0})
    recorder = train_tiny(plan_for(profile, tiny_job(tmp_path / "data", max_steps=8, logging_steps=2)), tmp_path)
    summary = recorder.summary
    assert summary["use"].keys() >= MEASURED | TIMED
    assert summary["use"]["device_waits_share"] == 1
    assert summary["verdict"]["limit"] == "host-bound"
    assert "plugins.batch.train = 8 (fewer, larger micro-batches)" in summary["verdict"]["next"]
    assert summary["gpu_utilization"] == 50, "what the pretend NVML reports"
