"""How well a run uses its device: figures of real runs, and verdicts whose cause is made."""

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import BertForSequenceClassification

from hwopt.data.batches.collate import StepDataset
from hwopt.hardware.monitor import GpuReading
from hwopt.testing import Recorder, plan_for, tiny_job, tiny_profile, train_tiny
from hwopt.training.telemetry import step_timer, use
from hwopt.training.telemetry.step_timer import StepTimer


@pytest.fixture(autouse=True)
def judged_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of any length have a verdict, and every step is sampled."""
    monkeypatch.setattr(use, "ENOUGH_SECONDS", 0.0)
    monkeypatch.setattr(step_timer, "PERIOD", 0.0)


def trained(folder: Path, steps: int = 6, **tables: Any) -> Recorder:
    return train_tiny(plan_for(tiny_profile(**tables), tiny_job(folder / "data", max_steps=steps, logging_steps=2)), folder)


def slow(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, seconds: float) -> None:
    """Make a method take `seconds` longer."""
    real = getattr(owner, name)

    def slower(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, slower)


@pytest.mark.integration
@pytest.mark.parametrize("limit", ["input-bound", "compute-bound"])
def test_what_is_slow_is_the_limit(limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = limit == "input-bound"
    slow(monkeypatch, *((StepDataset, "__getitem__") if loader else (BertForSequenceClassification, "forward")), 0.5)
    heard = trained(tmp_path)
    assert heard.summary["verdict"]["limit"] == limit
    told = [message for message in heard.messages if "-bound" in message]
    assert len(told) == loader, "it is told once, and only if there is something to change"
    assert all(message.startswith("input-bound: the loop waited ") for message in told)


def test_a_gpu_that_lowers_its_clock_is_throttled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hot = GpuReading(gpu_percent=97.0, power_watts=120.0, temperature_celsius=93.0, slowdowns=frozenset({"thermal (hardware)"}))
    monkeypatch.setattr(use, "gpu_reader", lambda device: lambda: hot)
    heard = trained(tmp_path)
    verdict = heard.summary["verdict"]
    assert (verdict["limit"], "thermal (hardware)" in verdict["figure"]) == ("throttled", True)
    assert (heard.summary["gpu_utilization"], heard.summary["use"]["temperature_celsius"]) == (97.0, 93.0)
    assert heard.summary["use"]["joules_per_sample"] > 0


def test_figures_are_in_the_log_and_in_the_summary(tmp_path: Path) -> None:
    trained(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    figures = next(row["use"] for row in rows if "loss" in row)
    shares = [figures[f"{part}_share"] for part in ("forward", "backward", "update")]
    assert sum(shares) == pytest.approx(1)
    assert min(shares) > 0
    assert figures["device_waits_share"] == 0, "a CPU does not wait for its host"
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["use"].keys() >= {"data_wait_share", "host_ms_per_micro_batch", "cpu_percent"}
    assert "mfu" not in summary["use"], "the peak of this CPU is unknown"
    assert summary["verdict"].keys() == {"limit", "figure", "next"}


def test_mfu_counts_real_tokens_and_what_is_trained() -> None:
    card = SimpleNamespace(dense_tflops=SimpleNamespace(bf16=100.0, fp16=None))
    model = torch.nn.Linear(10, 10, bias=False)
    run: Any = SimpleNamespace(
        device=torch.device("cpu"),
        inner_model=model,
        observation=SimpleNamespace(matmul_dtypes={"c10::BFloat16": 9, "float": 1}),
        plan=SimpleNamespace(context=SimpleNamespace(card=card), model=SimpleNamespace(flops_per_token=1e9)),
    )
    meter = use.UseMeter(run)
    assert meter.mfu(10_000) == pytest.approx(3e13 / 1e14), "forward, and gradients of inputs and weights"
    model.requires_grad_(False)
    assert meter.mfu(10_000) == pytest.approx(2e13 / 1e14), "frozen weights have no gradients"
    run.observation.matmul_dtypes = {"c10::Half": 1}
    assert meter.mfu(10_000) is None, "the profile has no peak for fp16"


def test_only_sampled_steps_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_timer, "PERIOD", 1e9)
    timer = StepTimer(torch.device("cpu"))
    for _ in range(3):
        timer.begin_step()
        for part in ("micro_batch", "forward", "backward"):
            timer.mark(part)
        timer.end_step()
    assert len(timer.take()) == 1
    assert timer.take() == []
