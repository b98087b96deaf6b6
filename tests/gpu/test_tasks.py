"""Training, loss and metrics of the tasks that label samples or tokens do not wait for the device."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from gpu.test_syncs import waits_forbidden
from task_rows import LABELLED, write_rows

from hwopt.testing import plan_for, tiny_job, tiny_profile, train_tiny

pytestmark = pytest.mark.device("any")


@pytest.mark.parametrize("kind", LABELLED)
def test_task_trains_and_its_loss_and_metrics_do_not_wait(kind: str, tmp_path: Path) -> None:
    data = {"train": str(write_rows(tmp_path / "rows.jsonl", 24)), "eval": None, "eval_fraction": 0.3, **LABELLED[kind]}
    plan = plan_for(tiny_profile(precision={"dtype": "bf16"}), tiny_job(tmp_path / "data", kind, data=data))
    recorder = train_tiny(plan, tmp_path)
    assert len(recorder.losses) == 3
    run = recorder.run
    labels = len(run.prepared.label_names)
    shape = (4, 9, labels) if kind == "token-classification" else (4, labels)
    outputs = SimpleNamespace(logits=torch.randn(shape, device="cuda"))
    targets = torch.zeros(shape[:2], device="cuda", dtype=torch.long if len(shape) == 3 else torch.float32)
    metrics = run.task.metrics(run.prepared, "cuda")
    with waits_forbidden():
        loss, count = run.task.training_loss(run.prepared, "cuda")(outputs, targets)
        metrics.update(outputs, targets, loss, count)
    assert metrics.compute()["loss"] == pytest.approx(float(loss) / targets.numel())
