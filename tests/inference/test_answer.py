"""hwopt predict without a file: answers in the terminal."""

import io
import json
import os
from pathlib import Path

import pytest
from task_rows import write_jsonl

from hwopt import api
from hwopt.cli import run_command
from hwopt.errors import DataError, InputError

SHORT = {"max_new_tokens": 5}


def predicted(run: Path, row: object, folder: Path) -> str:
    api.predict(run, write_jsonl(folder / "in.jsonl", [row]), folder / "out.jsonl", generation=SHORT, overwrite=True)
    return str(json.loads((folder / "out.jsonl").read_text())["generated_text"])


def test_turns_are_answered_as_the_same_conversation_in_a_file(chat: Path, tmp_path: Path) -> None:
    answerer, turns = api.answerer(chat, generation=SHORT), []
    for text in ("what is 1", "what is 2"):
        parts: list[str] = []
        assert not answerer.answer(text, parts.append), "the model is cut, it has learned nothing"
        turns.append({"role": "user", "content": text})
        assert "".join(parts) == predicted(chat, {"messages": turns}, tmp_path)
        turns.append({"role": "assistant", "content": "".join(parts)})
    assert answerer.messages == turns
    with pytest.raises(DataError, match="the conversation has .* tokens, which leaves no room to generate"):
        answerer.answer("what " * 300, parts.append)
    assert answerer.messages == turns
    answerer.forget()
    assert answerer.answer("what is 1", parts.append) is False
    assert answerer.messages == turns[:2]


def test_lines_of_a_pipe_are_answered(chat: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"what is 1\n\n{'what ' * 300}\nwhat is 1"))
    assert run_command(["predict", str(chat), "--max-new-tokens", "5"]) == 0
    found = capsys.readouterr()
    first, second = found.out.splitlines()
    assert first == second, "an empty line begins a new conversation"
    assert "no answer: the conversation has" in found.err
    assert "the answer is cut at 5 tokens (--max-new-tokens)" in found.err


def test_terminal_gets_a_prompt_and_the_answer(
    generator: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run was trained on prompts with completions: each line is a prompt."""
    main, terminal = os.openpty()
    os.write(main, b"what is 1\n\x04")
    with open(terminal, encoding="utf-8") as typed:
        monkeypatch.setattr("sys.stdin", typed)
        assert run_command(["predict", str(generator), "--max-new-tokens", "5"]) == 0
    os.close(main)
    found = capsys.readouterr()
    assert "Type the begin of a text. Ctrl-D ends." in found.err
    assert found.out.replace("> ", "").strip("\n") == predicted(generator, {"question": "what is 1"}, tmp_path)
    assert found.out.count("> ") == 2


def test_what_to_give_instead_is_said(classifier: Path, generator: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match=r"task\.kind = 'text-classification'. Give a file with the columns of its"):
        api.answerer(classifier)
    for arguments, message in {
        ("-o", "out.csv"): "--output needs FILE",
        ("--batch-size", "4"): "--batch-size needs FILE",
        ("a.csv",): "Missing option '-o' / '--output'",
    }.items():
        assert run_command(["predict", str(generator), *arguments]) == 2
        assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())
