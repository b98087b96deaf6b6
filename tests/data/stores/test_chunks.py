from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from task_rows import prepared_of, write_jsonl

from hwopt.config.job import Job
from hwopt.data import tokenizer
from hwopt.data.stores import chunks
from hwopt.data.stores.chunks import Chunks

ROWS = [{"text": "the cat sat on the mat " * (number % 7 + 1) + str(number), "label": "ab"[number % 2]} for number in range(200)]
CHILD = """
import os, signal, sys
from pathlib import Path
from task_rows import prepared_of
from hwopt.config.job import Job
from hwopt.data import tokenizer
from hwopt.data.stores import chunks
tokenizer.CHUNK, chunks.CHUNK_BYTES = 10, 1_000
batches, real = [], tokenizer.encoded_batch
def encoded_batch(*given):
    batches.append(given)
    if len(batches) == 12:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*given)
tokenizer.encoded_batch = encoded_batch
prepared_of(Job.model_validate_json(sys.argv[1]), Path(sys.argv[2]), None)
"""


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.integration
def test_a_killed_process_is_continued_and_the_store_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = {"train": write_jsonl(tmp_path / "train.jsonl", ROWS), "max_length": 20}
    model = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 16}
    job = Job.model_validate({"model": {"config": model}, "data": data})
    whole = prepared_of(job, tmp_path / "whole", None).train.folder
    ended = subprocess.run([sys.executable, "-c", CHILD, job.model_dump_json(), tmp_path], cwd=Path(__file__).parents[2])
    assert ended.returncode == -signal.SIGKILL
    (left,) = tmp_path.rglob("*.chunks")
    done = Chunks(left).done
    assert 0 < done < len(ROWS)

    recent, abandoned = left.with_name(".recent.chunks"), left.with_name(".abandoned.chunks")
    for folder in (recent, abandoned):
        folder.mkdir()
    os.utime(abandoned, (0, 0))

    tokenised: list[int] = []
    real = tokenizer.encoded_batch

    def counted(model: Any, texts: list[list[str]], types: bool, most: int | None = None) -> Any:
        tokenised.extend([len(texts[0])] * (most is None))
        return real(model, texts, types, most)

    monkeypatch.setattr(tokenizer, "encoded_batch", counted)
    store = prepared_of(job, tmp_path, None).train
    assert sum(tokenised) == len(ROWS) - done
    assert store.folder.name == whole.name
    assert files_of(store.folder) == files_of(whole)
    assert list(left.parent.glob("*.chunks")) == [recent]


def test_what_follows_the_last_state_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 7)
    first = Chunks(tmp_path)
    first.state["truncated"] = 1
    first.add(2, {"ids": np.array([1, 2], np.int32)})
    first.add(3, {"ids": np.array([3], np.int32)})  # still in memory
    with (tmp_path / "ids").open("ab") as file:
        file.write(b"half a chunk")
    second = Chunks(tmp_path)
    assert (second.done, second.state) == (2, {"truncated": 1})
    second.add(4, {"ids": np.array([5, 6], np.int32)})
    assert second.array("ids", np.int32).tolist() == [1, 2, 5, 6]
    with (tmp_path / "ids").open("wb"):  # a file that lost its content after a power failure
        pass
    assert Chunks(tmp_path).done == 0
