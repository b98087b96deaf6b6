"""Three finished runs, trained once: a classifier in bf16, and language models on prompts and on conversations."""

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


def conversation(number: int, answered: bool = True) -> list[dict[str, str]]:
    answer = [{"role": "assistant", "content": f"it is {number % 3}"}] if answered else []
    return [{"role": "user", "content": f"what is {number}"}, *answer]


@pytest.fixture(scope="session")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a causal-lm run that was trained on conversations."""
    folder = tmp_path_factory.mktemp("chat")
    source = write_jsonl(folder / "train.jsonl", [{"messages": conversation(number)} for number in range(16)])
    data = {"train": source, "eval": source, "chat_template": "chatml", "max_length": 60}
    train_tiny(plan_for(tiny_profile(), tiny_job(folder / "data", "causal-lm", data=data, max_steps=6)), folder)
    return folder / "run"
