"""The tasks on CUDA: those that label samples or tokens do not wait for the device; an encoder-decoder in half precision."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu.test_syncs import waits_forbidden
from task_rows import LABELLED, write_rows

from hwopt import api
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


PRECISIONS = [{"dtype": "bf16"}, {"dtype": "fp16", "level": "O1"}, {"dtype": "fp16", "level": "O2"}]


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset:UserWarning")  # of Triton 3.9, by a kernel of torch
@pytest.mark.parametrize("precision", PRECISIONS, ids=["bf16", "fp16-O1", "fp16-O2"])
def test_sequence_to_sequence_trains_in_half_precision_and_writes_texts(precision: dict[str, Any], tmp_path: Path) -> None:
    plan = plan_for(tiny_profile(precision=precision), tiny_job(tmp_path / "data", "seq2seq-lm"))
    recorder = train_tiny(plan, tmp_path)
    assert len(recorder.losses) == 3
    assert all(map(math.isfinite, recorder.losses))
    decoder = recorder.run.inner_model.decoder
    assert next(decoder.parameters()).device.type == "cuda"
    source = next((tmp_path / "data").glob("eval*.jsonl"))
    report = api.predict(tmp_path / "run", str(source), tmp_path / "out.jsonl", generation={"max_new_tokens": 3})
    rows = list(map(json.loads, (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()))
    assert report.predicted == len(rows) > 0
    assert all(isinstance(row["generated_text"], str) for row in rows)
