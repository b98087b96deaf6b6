"""`hwopt init`: from a data file to a job that can be planned."""

import io
from pathlib import Path
from typing import Any

import pytest
from command_line import hwopt
from task_rows import MESSAGES, write_jsonl

from hwopt.config.job import Job, load_job
from hwopt.testing import write_samples


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_samples(tmp_path / "train.jsonl", 40)
    return tmp_path


def written(folder: Path, name: str = "job.toml") -> Job:
    return load_job(folder / name).job


def said_of(folder: Path, rows: list[dict[str, Any]]) -> str:
    """What `hwopt init` says of conversations."""
    write_jsonl(folder / "chat.jsonl", rows)
    made = hwopt("init", "chat.jsonl", "--yes", cwd=folder)
    assert (made.returncode, made.stderr) == (0, "")
    return made.stdout


def test_written_job_can_be_planned_and_previewed(tmp_path: Path) -> None:
    assert "hwopt run job.toml --profile cpu" in said_of(tmp_path, [{"messages": MESSAGES}] * 20)
    assert written(tmp_path).task.kind == "causal-lm"
    planned = hwopt("plan", "--profile", "cpu", "--format", "json", cwd=tmp_path)
    assert planned.returncode == 0, planned.stderr
    assert hwopt("plan", "--sample", "1", "--profile", "cpu", cwd=tmp_path).returncode == 0


def test_rows_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    rows = [f"a text of row {row},{'yes' if row % 2 else 'no'}\n" for row in range(40)]
    (tmp_path / "train.csv").write_text("text,label\n" + "".join(rows[:20]) + "a text,yes,no\n" + "".join(rows[20:]))
    made = hwopt("init", "train.csv", "--yes", cwd=tmp_path)
    assert "skipped 1 of 41 rows of train.csv: line 22 (has 3 columns, the header has 2)" in made.stdout


def test_parts_that_the_template_leaves_out_are_named(tmp_path: Path) -> None:
    thinking = MESSAGES[1] | {"reasoning_content": "A greeting"}
    said = said_of(tmp_path, [{"messages": [MESSAGES[0], MESSAGES[1] if row % 4 else thinking]} for row in range(20)])
    assert "the chat template does not write the reasoning_content of 5 of 20 conversations, the first one at" in said
    assert "answers end with <|im_end|>" in said


def test_conversations_with_tool_calls_give_a_job_that_trains_them(tmp_path: Path) -> None:
    number = {"type": "object", "properties": {"a": {"type": "integer", "description": "A number to add to the other one"}}}
    tools = [{"type": "function", "function": {"name": name, "parameters": number}} for name in ("add", "subtract")]
    calls = [{"type": "function", "function": {"name": "add", "arguments": {}}}]
    row = {"messages": [MESSAGES[0], {"role": "assistant", "content": "", "tool_calls": calls}, MESSAGES[1]], "tools": tools}
    said = said_of(tmp_path, [row] * 20)
    assert "hwopt run job.toml" in said
    assert "does not write" not in said
    assert '{"name": "add", "arguments": {}}' in hwopt("plan", "--sample", "1", "--profile", "cpu", cwd=tmp_path).stdout


def test_conversations_that_cannot_be_used_are_named_and_the_job_is_written(tmp_path: Path) -> None:
    said = said_of(tmp_path, [{"messages": [MESSAGES[0], {**MESSAGES[1], "weight": 0}]}] * 20)
    assert "none of its 20 rows can be used" in said
    assert said.endswith(
        "A run would stop here. Correct the data or job.toml, then look at a sample:\n\n"
        "hwopt plan job.toml --sample 1     # a training sample as the model sees it\n"
    )
    assert written(tmp_path).data.messages == "messages"


def answering(*answers: str) -> io.StringIO:
    terminal = io.StringIO("".join(answer + "\n" for answer in answers))
    terminal.isatty = lambda: True
    return terminal


def test_answers_are_written(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", answering("train.jsonl", "", "txt", "text", "", "64", "my-model", "t4_16gb"))
    made = hwopt("init", "-o", "mine.toml", cwd=data)
    assert made.returncode == 0, made.stderr
    assert "'txt' is not one of 'text', 'label'" in made.stdout + made.stderr
    found = written(data, "mine.toml")
    assert (found.data.max_length, found.model.name) == (64, "my-model")
    assert "hwopt run mine.toml --profile t4_16gb" in made.stdout


def test_empty_answers_take_the_proposals(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hwopt("init", "train.jsonl", "--yes", "-o", "one.toml", cwd=data)
    monkeypatch.setattr("sys.stdin", answering(*[""] * 6))
    made = hwopt("init", "train.jsonl", "-o", "two.toml", cwd=data)
    assert made.returncode == 0, made.stderr
    assert (data / "two.toml").read_text().replace("two.toml", "one.toml") == (data / "one.toml").read_text()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["missing.csv", "--yes"], 4, "missing.csv: no such file"),
        (["numbers.csv", "--yes"], 4, "numbers.csv: no column holds text. It has: a, b"),
        (["--yes"], 2, "hwopt init --yes needs the data"),
        (["train.jsonl"], 2, "add --yes"),
        (["train.jsonl", "--yes", "-o", "job.yaml"], 2, "-o job.yaml: a job ends with .toml: job.yaml.toml"),
        (["train.jsonl", "--yes", "-o", "taken.toml"], 2, "taken.toml: exists; hwopt init overwrites no file"),
    ],
)
def test_bad_input_of_init_is_one_message_and_writes_nothing(arguments: list[str], code: int, message: str, data: Path) -> None:
    (data / "numbers.csv").write_text("a,b\n1,2\n3,4\n")
    (data / "taken.toml").write_text("mine")
    before = sorted(data.iterdir())
    found = hwopt("init", *arguments, cwd=data)
    assert found.returncode == code
    assert message in found.stderr
    assert "Traceback" not in found.stderr
    assert sorted(data.iterdir()) == before
    assert (data / "taken.toml").read_text() == "mine"
