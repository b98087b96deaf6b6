"""Two finished runs, trained once: a classifier in bf16, and a language model on prompts."""

from __future__ import annotations

from pathlib import Path

import pytest
from task_rows import write_jsonl

from hwopt.testing import plan_for, tiny_job, tiny_profile, train_tiny


@pytest.fixture(scope="session")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose eval data is `../data/eval.jsonl`."""
    folder = tmp_path_factory.mktemp("classifier")
    job = tiny_job(folder / "data", max_steps=12, learning_rate=1e-2, samples=80)
    train_tiny(plan_for(tiny_profile(precision={"dtype": "bf16"}), job), folder)
    return folder / "run"


@pytest.fixture(scope="session")
def generator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a causal-lm run whose eval data is `../eval.jsonl`."""
    folder = tmp_path_factory.mktemp("generator")
    for name in ("train", "eval"):
        rows = [{"question": f"what is {number}", "answer": f"it is {number % 3}"} for number in range(24)]
        write_jsonl(folder / f"{name}.jsonl", rows)
    data = {name: str(folder / f"{name}.jsonl") for name in ("train", "eval")} | {"prompt": "question", "completion": "answer"}
    job = tiny_job(folder / "data", "causal-lm", data=data, max_steps=20, learning_rate=2e-2)
    train_tiny(plan_for(tiny_profile(), job), folder)
    return folder / "run"
