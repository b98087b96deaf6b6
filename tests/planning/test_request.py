"""What a plan is asked for."""

import json
from pathlib import Path

import tomlkit

from hwopt import api
from hwopt.testing import TINY_BERT, Recorder, write_samples


def test_plan_has_the_parameters_of_the_model_that_is_trained(tmp_path: Path) -> None:
    config = {key: value for key, value in TINY_BERT.items() if key != "vocab_size"}
    train = str(write_samples(tmp_path / "train.jsonl", 24))
    job = {"model": {"config": config}, "data": {"train": train, "max_length": 16}, "training": {"max_steps": 1}}
    (tmp_path / "job.toml").write_text(tomlkit.dumps({**job, "task": {"kind": "text-classification"}}))
    plan = api.resolve("cpu", tmp_path / "job.toml", cache=tmp_path / "cache")
    recorder = Recorder()
    api.execute(plan, tmp_path / "run", recorder, cache=tmp_path / "cache")
    trained = recorder.run.inner_model
    assert plan.model.parameters == sum(parameter.numel() for parameter in trained.parameters())
    assert plan.model.vocab_size == json.loads((tmp_path / "run/final/config.json").read_text())["vocab_size"] < 1_000
