"""Prediction and evaluation on a CUDA device: device, precision, and a batch that does not fit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hwopt import api
from hwopt.inference.trained_model import find_run_model, load_trained_model
from hwopt.tasks.predictors import ClassPredictor
from hwopt.testing import plan_for, tiny_job, tiny_profile, train_tiny, write_samples


@pytest.mark.device("any")
@pytest.mark.parametrize("tables", [{"dtype": "fp16"}, {"dtype": "fp16", "level": "O2"}])
def test_inference_runs_on_the_device_in_the_precision_of_the_run(tables: dict[str, Any], tmp_path: Path) -> None:
    train_tiny(plan_for(tiny_profile(precision=tables), tiny_job(tmp_path / "data", max_steps=2)), tmp_path)
    loaded = load_trained_model(find_run_model(tmp_path / "run"), tmp_path / "cache")
    assert {parameter.device.type for parameter in loaded.model.parameters()} == {"cuda"}
    with loaded.inference():
        assert torch.get_autocast_dtype("cuda") == torch.float16
    source = str(write_samples(tmp_path / "in.jsonl", 20, seed=3))
    assert api.predict(tmp_path / "run", source, tmp_path / "out.jsonl").predicted == 20
    assert api.evaluate(tmp_path / "run", source).samples == 20


@pytest.mark.device("any")
def test_batch_that_does_not_fit_is_halved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_tiny(plan_for(tiny_profile(), tiny_job(tmp_path / "data", max_steps=1)), tmp_path)
    source, warnings = str(write_samples(tmp_path / "in.jsonl", 20, seed=3)), []
    whole, total = ClassPredictor.predict, torch.cuda.get_device_properties(0).total_memory

    def hungry(self: ClassPredictor, inputs: dict[str, torch.Tensor]) -> Any:
        used = torch.empty(total // 4 * len(inputs["input_ids"]), dtype=torch.uint8, device="cuda")  # three rows fit
        del used
        return whole(self, inputs)

    monkeypatch.setattr(ClassPredictor, "predict", hungry)
    report = api.predict(tmp_path / "run", source, tmp_path / "out.jsonl", batch_size=8, warn=warnings.append)
    assert (report.predicted, len(warnings)) == (20, 2)
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert all(row["predicted_label"] for row in rows)


@pytest.mark.device("any")
def test_text_is_generated_on_the_device(tmp_path: Path) -> None:
    train_tiny(plan_for(tiny_profile(), tiny_job(tmp_path / "data", "causal-lm", max_steps=1)), tmp_path)
    source = str(write_samples(tmp_path / "in.jsonl", 5, seed=3))
    report = api.predict(tmp_path / "run", source, tmp_path / "out.jsonl", generation={"max_new_tokens": 3})
    assert (report.rows, report.columns) == (5, ("generated_text",))
