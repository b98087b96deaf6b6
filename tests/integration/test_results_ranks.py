"""Class weights, early stopping and the results of each class on two ranks: as on one rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from integration.forks import run_ranks
from safetensors.torch import load_file

from hwopt.cli import run_command
from hwopt.testing import TINY_BERT, relative_error, write_samples

PROFILE = 'name = "ranks"\n[plugins.batch]\ntrain = 3\neffective = 12\n'


def test_two_ranks_have_the_results_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, samples in (("train", 41), ("dev", 13), ("test", 9)):
        write_samples(tmp_path / f"{name}.jsonl", samples, seed=samples)
    pairs = ", ".join(f"{key} = {json.dumps(value)}" for key, value in TINY_BERT.items())
    (tmp_path / "job.toml").write_text(
        f"[model]\nconfig = {{ {pairs} }}\n"
        '[data]\ntrain = "train.jsonl"\neval = "dev.jsonl"\ntest = "test.jsonl"\nmax_length = 32\n'
        "[task]\nclass_weights = { colour = 4.0 }\nlabel_smoothing = 0.1\n"
        "[training]\nmax_steps = 12\nlearning_rate = 1e-3\nlogging_steps = 1\neval_steps = 2\n"
        'metric_for_best_model = "eval_loss"\nearly_stopping_patience = 2\nearly_stopping_threshold = 5.0\n'
    )
    (tmp_path / "ranks.toml").write_text(PROFILE)
    monkeypatch.chdir(tmp_path)
    arguments = ["run", "job.toml", "--profile", "./ranks.toml", "--name"]
    assert run_ranks([*arguments, "two"], 2, tmp_path, tmp_path / "two.out") == [0, 0], (tmp_path / "two.out").read_text()
    assert run_command([*arguments, "one"]) == 0
    one, two = (json.loads((tmp_path / "runs" / name / "summary.json").read_text()) for name in ("one", "two"))
    assert one["step"] == two["step"] == 6
    assert one["early_stopping_count"] == two["early_stopping_count"] == 2
    assert two["train_loss"] == pytest.approx(one["train_loss"], rel=1e-5)
    for prefix in ("best_eval_", "test_"):
        assert two[f"{prefix}confusion_matrix"] == one[f"{prefix}confusion_matrix"]
        assert two[f"{prefix}classes"] == one[f"{prefix}classes"]
    weights = [load_file(tmp_path / "runs" / name / "final/model.safetensors") for name in ("one", "two")]
    assert relative_error(*weights) < 1e-5
    assert all(torch.isfinite(tensor).all() for tensor in weights[1].values())
