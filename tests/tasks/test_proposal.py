"""The job that is proposed for some data and a machine."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hwopt.config.job import Job
from hwopt.config.toml import parse_toml
from hwopt.hardware.device import described
from hwopt.tasks import proposal as propose
from hwopt.tasks.proposal import ProposedModel, eval_fraction, propose_length, propose_model
from hwopt.tasks.recognition import DataColumns

CPU = described("CPU", None, 16)
SMALL, LARGE = described("RTX 3070", (8, 6), 7.78), described("H100", (9, 0), 79.1)
TEXTS = DataColumns(
    "train.csv", 500, ("text", "label"), "text-classification", {"text": ["text"], "label": "label"}, "", (90,) * 500
)
CHAT = DataColumns("chat.jsonl", 500, ("messages",), "causal-lm", {"messages": "messages"}, "", (2_000,) * 500, chat=True)


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(propose, "is_available", lambda name: True)


@pytest.mark.usefixtures("online")
@pytest.mark.parametrize(
    ("data", "hardware", "model"),
    [
        (TEXTS, CPU, "distilbert/distilbert-base-uncased"),
        (TEXTS, SMALL, "google-bert/bert-base-uncased"),
        (replace(TEXTS, ascii=False), SMALL, "FacebookAI/xlm-roberta-base"),
        (CHAT, CPU, "HuggingFaceTB/SmolLM2-135M-Instruct"),
        (CHAT, LARGE, "Qwen/Qwen2.5-1.5B-Instruct"),
        (replace(CHAT, chat=False), described("A10", (8, 6), 22), "Qwen/Qwen2.5-0.5B"),
    ],
)
def test_model_follows_task_language_and_memory(data: DataColumns, hardware: Any, model: str) -> None:
    assert propose_model(data, hardware).name == model


def test_without_the_hub_a_model_with_random_weights_is_proposed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(propose, "hub_is_out_of_reach", lambda: True)
    found = propose_model(replace(TEXTS, source="x.csv"), CPU)
    assert found.name is None
    assert "out of reach" in found.why
    assert "distilbert/distilbert-base-uncased" in found.why


def test_hub_out_of_reach_is_not_asked_for_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client would retry for half a minute, with a message each time."""
    asked: list[object] = []
    monkeypatch.setattr(propose, "hub_is_out_of_reach", lambda: True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("socket.getaddrinfo", lambda *arguments, **options: asked.append(arguments) or [])
    assert not propose.is_available("owner/a-model-that-no-cache-has")
    assert not asked


@pytest.mark.parametrize(
    ("data", "length"),
    [
        (TEXTS, 32),
        (replace(TEXTS, lengths=(90,) * 490 + (1_000,) * 10), 384),
        (replace(TEXTS, lengths=(90,) * 499 + (1_000,)), 32),
        (replace(TEXTS, lengths=(9_000,)), 512),
        (CHAT, 768),
        (replace(CHAT, lengths=(10,)), 256),
        (replace(CHAT, lengths=(900_000,)), 2048),
        (replace(CHAT, joined=True, chat=False), 1024),
    ],
)
def test_length_covers_almost_all_texts(data: DataColumns, length: int) -> None:
    assert propose_length(data) == length


@pytest.mark.parametrize(
    ("data", "fraction"),
    [
        (TEXTS, 0.1),
        (replace(TEXTS, rows=50), 0.2),
        (replace(TEXTS, rows=5), None),
        (replace(TEXTS, rows=1, joined=True), 0.1),
        (replace(TEXTS, held_out={"eval": "dev.csv"}), None),
    ],
)
def test_a_part_is_held_out_if_there_is_no_evaluation_file(data: DataColumns, fraction: float | None) -> None:
    assert eval_fraction(data) == fraction


def proposal(data: DataColumns, model: str | None) -> propose.Proposal:
    return propose.Proposal(data, ProposedModel(model, "why\n[data]"), 128, "cpu", "", ("cpu",))


@pytest.mark.parametrize("data", [TEXTS, CHAT, replace(TEXTS, held_out={"eval": "dev.csv", "test": "test.csv"})])
@pytest.mark.parametrize("model", ["google-bert/bert-base-uncased", 'C:\\models\\"bert"', None])
def test_written_text_is_the_proposed_job(data: DataColumns, model: str | None) -> None:
    made = proposal(data, model)
    found = Job.model_validate(parse_toml(made.text(Path("job.toml")).encode(), "job").data)
    assert (found.task.kind, found.model.name, found.data.train) == (data.kind, model, data.source)
    assert (found.data.eval, found.data.test) == (data.held_out.get("eval"), data.held_out.get("test"))
    assert found.data.messages == data.keys.get("messages")
    assert found.data.chat_template == ("chatml" if data.chat and model is None else None)
    assert found.data.max_length == 128
