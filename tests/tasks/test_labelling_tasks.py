"""Tasks that label samples or tokens: how a step is split, padded or packed does not change the training; decoders; plugins."""

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
from cases import DAILY
from safetensors.torch import load_file
from task_rows import LABELLED, write_rows

from hwopt import api
from hwopt.testing import TINY_BERT, TINY_LLAMA, plan_for, relative_error, tiny_job, tiny_profile, train_tiny


def train(folder: Path, kind: str, weights: str | None, **plugins: Any) -> dict[str, Any]:
    folder.mkdir()
    data = {"train": str(write_rows(folder / "rows.jsonl", 24)), "eval": None, "eval_fraction": 0.2, **LABELLED[kind]}
    job = tiny_job(folder, kind, config=TINY_BERT, data=data, max_steps=4)
    if weights is not None:
        table = job.job.task.model_copy(update={"class_weights": weights})
        job = type(job)(job.job.model_copy(update={"task": table}), job.document)
    recorder = train_tiny(plan_for(tiny_profile(**plugins), job), folder)
    assert recorder.warnings == []
    seen = {entry.name: evidence.status for entry, evidence in recorder.found}
    assert all(seen[name] == "active" for name in plugins if name != "batch")
    return load_file(folder / "run" / "final" / "model.safetensors")


@pytest.mark.parametrize(
    ("kind", "weights"),
    [("multi-label-classification", None), ("token-classification", "balanced"), pytest.param("regression", None, marks=DAILY)],
)
def test_split_and_packing_do_not_change_the_training(kind: str, weights: str | None, tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", kind, weights, batch={"train": 8, "gradient_accumulation_steps": 1})
    for name, rows, plugins in (("pieces", 3, {}), ("cut", 4, {"length_batching": {}}), ("packed", 4, {"pack": {}})):
        found = train(tmp_path / name, kind, weights, batch={"train": rows, "effective": 8}, **plugins)
        assert relative_error(found, whole) < 1e-5, name


@pytest.mark.parametrize("kind", LABELLED)
def test_decoder_is_trained_and_predicts(kind: str, tmp_path: Path) -> None:
    data = {"train": str(write_rows(tmp_path / "rows.jsonl", 24)), "eval": None, "eval_fraction": 0.2, **LABELLED[kind]}
    plan = plan_for(tiny_profile(length_batching={}), tiny_job(tmp_path / "data", kind, config=TINY_LLAMA, data=data))
    recorder = train_tiny(plan, tmp_path)
    assert all(map(math.isfinite, recorder.losses))
    run, rows, cache = tmp_path / "run", str(tmp_path / "rows.jsonl"), tmp_path / "cache"
    assert api.predict(run, rows, tmp_path / "out.jsonl", cache=cache).predicted == 24
    if kind == "token-classification":
        assert not (run / "eval_rows.csv").exists()
    else:
        predicted = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        held_out = list(csv.DictReader((run / "eval_rows.csv").read_text().splitlines()))
        assert len(held_out) == len(recorder.run.prepared.eval) > 3
        for row in held_out:
            (same,) = [each for each in predicted if each["text"] == row["text"]]
            assert row.keys() == same.keys()
            for name in row.keys() - {"text", "tokens", "tags"}:
                found = json.loads(row[name])
                assert found == (same[name] if isinstance(found, list) else pytest.approx(same[name], rel=1e-4)), name
    assert api.evaluate(run, rows, cache=cache).samples == 24


def test_summary_of_a_metric_that_is_not_defined_is_valid_json(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": f"up {n}", "score": float(n)}) + "\n" for n in range(8)))
    held_out = tmp_path / "dev.jsonl"
    held_out.write_text(json.dumps({"text": "down", "score": 1.0}) + "\n")
    data = {"train": str(rows), "eval": str(held_out), "label": "score"}
    plan = plan_for(tiny_profile(), tiny_job(tmp_path / "data", "regression", data=data))
    api.execute(plan, tmp_path / "run", cache=tmp_path / "cache")
    found = json.loads((tmp_path / "run" / "summary.json").read_text(), parse_constant=pytest.fail)
    assert found["eval_pearson"] is None
    assert found["eval_mse"] > 0
