"""Samples of a language model after each evaluation."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hwopt import api
from hwopt.testing import Recorder, plan_for, saved_bits, tiny_job, tiny_profile
from hwopt.training import evaluation


def run(folder: Path, prompts: list[str], **plugins: Any) -> Recorder:
    data = {"sample_prompts": prompts}
    job = tiny_job(folder / "data", "causal-lm", max_steps=4, eval_steps=2, save_steps=4, data=data)
    recorder = Recorder()
    api.execute(plan_for(tiny_profile(**plugins), job), folder / "run", recorder, cache=folder / "cache")
    return recorder


def test_samples_are_written_after_each_evaluation_and_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "NEW_TOKENS", 5)
    recorder = run(tmp_path / "with", ["red one", "blue"])
    rows = [json.loads(line) for line in (tmp_path / "with" / "run" / "samples.jsonl").read_text().splitlines()]
    assert [(row["step"], row["prompt"]) for row in rows] == [(2, "red one"), (2, "blue"), (4, "red one"), (4, "blue")]
    assert "\n".join(recorder.messages).count("sample at step") == 4
    run(tmp_path / "without", [])
    assert saved_bits(tmp_path / "with" / "run" / "checkpoint-4") == saved_bits(tmp_path / "without" / "run" / "checkpoint-4")


def test_an_adapter_over_half_weights_writes_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such weights compute under autocast only, and generate() calls the model below the forward that has it."""
    monkeypatch.setattr(evaluation, "NEW_TOKENS", 2)
    recorder = run(tmp_path, ["red one"], adapter={"kind": "lora", "always": True}, precision={"dtype": "bf16"})
    assert not [warning for warning in recorder.warnings if "generation failed" in warning]
    assert (tmp_path / "run" / "samples.jsonl").is_file()


def test_failed_generation_warns_once_and_the_run_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> str:
        raise torch.OutOfMemoryError("out of memory: tried to allocate 2 GiB")

    monkeypatch.setattr(evaluation.GeneratedSamples, "generate", fail)
    recorder = run(tmp_path, ["red"])
    assert len([warning for warning in recorder.warnings if "generation failed" in warning]) == 1
    assert recorder.run.step == 4
