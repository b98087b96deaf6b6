import json
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from hwopt.config.job import Job
from hwopt.data.tokenizer_training import tokenizer_fingerprint
from hwopt.errors import InputError
from hwopt.tasks import base
from hwopt.tasks.prepared import Prepared
from hwopt.testing import TINY_BERT, TINY_T5
from tests.task_rows import prepared_of, write_jsonl, write_rows

GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}
CHAT = [{"messages": [{"role": "user", "content": f"{n} and"}, {"role": "assistant", "content": f"{n + 1}"}]} for n in range(20)]
CLASSES = [{"text": f"{n} red", "label": "0" + "ab"[n % 2]} for n in range(20)]
PAIRS = [{"document": f"{n} red {n}", "summary": f"{n} of the many numbers"} for n in range(20)]
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], list[Any]]] = {
    "text-classification": (
        TINY_BERT,
        {"eval_fraction": 0.2, "on_bad_row": "skip", "max_bad_rows": 0.2},
        {"class_weights": "balanced"},
        [*CLASSES, {"text": "without a label"}],
    ),
    "token-classification": (TINY_BERT, {"text": "tokens", "label": "tags", "eval_fraction": 0.2}, {}, []),
    "causal-lm": (GPT2, {"chat_template": "chatml"}, {}, CHAT),
    "seq2seq-lm": (TINY_T5, {"prompt": "document", "completion": "summary", "max_target_length": 4}, {}, PAIRS),
}


def job_of(kind: str, folder: Path, **data: Any) -> Job:
    """A job of the task with data for each part, which it reads from files in `folder`."""
    config, keys, task, rows = CASES[kind]
    train = folder / "train.jsonl"
    if not train.exists():
        write_rows(train, 20) if kind == "token-classification" else write_jsonl(train, rows)
        lines = train.read_text().splitlines(keepends=True)
        for number, part in enumerate(("eval", "test", "hard"), 2):
            (folder / f"{part}.jsonl").write_text("".join(lines[: 2 * number]))
    parts = {"train": str(train), "test": str(folder / "test.jsonl"), "more_eval": {"hard": str(folder / "hard.jsonl")}}
    parts |= {} if "eval_fraction" in keys else {"eval": str(folder / "eval.jsonl")}
    return Job.model_validate({"model": {"config": config}, "data": parts | keys | data, "task": {"kind": kind, **task}})


def facts(prepared: Prepared) -> dict[str, Any]:
    """What a run reads of `prepared`, as values that compare."""
    found = {field.name: getattr(prepared, field.name) for field in fields(prepared)}
    tokenizer = found.pop("tokenizer")
    found |= {
        name: {"folder": store.folder, "rows": len(store), "counts": store.counts.tolist()}
        for name, store in prepared.parts.items()
    }
    found |= {"more_eval": sorted(prepared.more_eval), "held_out": list(prepared.held_out)}
    return found | {
        "tokenizer": [tokenizer_fingerprint(tokenizer), tokenizer.chat_template, tokenizer.pad_token, tokenizer.padding_side]
    }


@pytest.mark.parametrize("kind", CASES)
def test_files_with_the_same_content_are_not_read_again(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, read_sources = [], base.read_sources
    monkeypatch.setattr(base, "read_sources", lambda job: read.append(1) or read_sources(job))

    def prepared(**data: Any) -> Prepared:
        read.clear()
        return prepared_of(job_of(kind, tmp_path, **data), tmp_path)

    first = prepared()
    expected = facts(first)
    assert read
    again = facts(prepared())
    assert not read
    assert json.loads(json.dumps(again["bad_rows"])) == json.loads(json.dumps(expected["bad_rows"]))
    assert again == expected

    shutil.rmtree(first.train.folder)
    assert facts(prepared()) == expected
    assert read, "a store is missing"

    prepared(max_length=40)
    assert read, "the job says something else"

    train = tmp_path / "train.jsonl"
    lines = train.read_text().splitlines(keepends=True)
    train.write_text("".join(lines[1:]))
    assert len(prepared().train) < len(first.train)
    assert read, "a file has other bytes"


def test_tokenizer_whose_rules_changed_is_seen(tmp_path: Path) -> None:
    first = prepared_of(job_of("text-classification", tmp_path), tmp_path)
    named = tmp_path / "tokenizer"
    first.tokenizer.save_pretrained(named)
    job = job_of("text-classification", tmp_path)
    job = Job.model_validate(job.model_dump(exclude_unset=True) | {"model": {"config": TINY_BERT, "tokenizer": str(named)}})
    assert prepared_of(job, tmp_path).train.folder == first.train.folder
    file = named / "tokenizer.json"
    rules = json.loads(file.read_text())
    rules["normalizer"]["lowercase"] = False
    file.write_text(json.dumps(rules))
    assert prepared_of(job, tmp_path).train.folder != first.train.folder


def test_template_given_as_text_is_refused(tmp_path: Path) -> None:
    """A text is too long for the name of a file."""
    with pytest.raises(InputError, match="cannot access"):
        prepared_of(job_of("causal-lm", tmp_path, chat_template="{{ messages }} " * 300), tmp_path)
