"""`hwopt plan --sample 1`: a training sample as the model sees it."""

import io
import json
from pathlib import Path

import pytest
import tomlkit
from command_line import hwopt
from task_rows import MESSAGES, write_jsonl

from hwopt.cli.plan import show_preview
from hwopt.report.terminal import Terminal
from hwopt.tasks.preview import Preview, Span
from hwopt.testing import TINY_LLAMA


def write_job(folder: Path, model: dict[str, object], task: str, data: dict[str, object]) -> None:
    tables = {"model": {"config": model}, "task": {"kind": task}, "data": data}
    (folder / "job.toml").write_text(tomlkit.dumps(tables), encoding="utf-8")


@pytest.fixture
def chat(tmp_path: Path) -> Path:
    write_jsonl(tmp_path / "chat.jsonl", [{"messages": MESSAGES}] * 8)
    data = {"train": "chat.jsonl", "eval_fraction": 0.25, "chat_template": "chatml", "max_length": 200}
    write_job(tmp_path, TINY_LLAMA | {"max_position_embeddings": 256}, "causal-lm", data)
    return tmp_path


def test_preview_marks_the_answers_of_a_conversation_with_brackets(chat: Path) -> None:
    found = hwopt("plan", "--sample", "1", "--profile", "cpu", cwd=chat)
    assert found.returncode == 0, found.stderr
    assert found.stdout.endswith(
        "\n<|im_start|>user\nHello?<|im_end|>\n<|im_start|>assistant\n[[Hi.<|im_end|>]]\n"
        "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n[[4<|im_end|>]]\n"
    )
    assert "sample: 1 of 6 training samples, 2 evaluation samples\n" in found.stdout
    assert "chat template: chatml; answers are found by" in found.stdout


def test_preview_follows_assistant_turns_of_the_command_line(chat: Path) -> None:
    found = hwopt("plan", "--sample", "1", "--profile", "cpu", "--set", "data.assistant_turns=last", "--format", "json", cwd=chat)
    spans = json.loads(found.stdout)["spans"]
    assert [span["text"] for span in spans if span["in_loss"]] == ["4<|im_end|>"]


def test_preview_of_prompts_marks_the_completion_and_the_end_of_text(tmp_path: Path) -> None:
    rows = [{"question": f"What is {n}?", "answer": f"It is {n}."} for n in range(4)]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    write_job(tmp_path, TINY_LLAMA, "causal-lm", {"train": "rows.jsonl", "prompt": "question", "completion": "answer"})
    found = json.loads(hwopt("plan", "--profile", "cpu", "--sample", "3", "--format", "json", cwd=tmp_path).stdout)
    assert [(span["text"], span["in_loss"]) for span in found["spans"]] == [
        ("What is 2?", False),
        ("It is 2.<|endoftext|>", True),
    ]
    assert (found["sample"], found["samples"]) == (3, 4)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--sample", "7"], 2, "--sample 7: the training data has 6 samples; give a number from 1 to 6"),
        (["--set", "data.max_length=999"], 2, "data.max_length: 999 is more than the 256 tokens"),
    ],
)
def test_bad_input_of_preview_is_one_message(arguments: list[str], code: int, message: str, chat: Path) -> None:
    found = hwopt("plan", "--sample", "1", "--profile", "cpu", *arguments, cwd=chat)
    assert found.returncode == code
    assert message in found.stderr
    assert "Traceback" not in found.stderr


def test_preview_on_a_terminal_uses_colour_instead_of_brackets() -> None:
    spans = (Span("Hello? ", False), Span("Hi.\x1b[2J", True))
    found = Preview(spans, None, 1, sample=1, samples=2, held_out={}, tokens=3)
    screen = Terminal(file=io.StringIO(), force_terminal=True, width=80, color_system="standard", no_color=False)
    show_preview(screen, found)
    shown = screen.file.getvalue()
    assert "Hello? \x1b[1;32mHi.\\x1b[2J\x1b[0m" in shown
    assert "[[" not in shown
