"""A token store in another interpreter."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from hwopt.data.stores.token_store import TokenStore


def make(lengths: list[int], per_token: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    tokens = sum(lengths)
    arrays = {
        "input_ids": np.arange(tokens, dtype=np.int32),
        "offsets": np.cumsum([0, *lengths]),
        "labels": np.arange(tokens if per_token else len(lengths)) + 100,
        "counts": np.array(lengths if per_token else [1] * len(lengths), np.int32),
    }
    return arrays, {"labels_per_token": per_token, "samples": len(lengths)}


def test_store_pickles_as_its_path_and_opens_in_another_process(tmp_path: Path) -> None:
    store = TokenStore.cached(tmp_path / "s", lambda: make([20_000, 3], False))
    store.row(0)
    assert len(pickle.dumps(store)) < 500
    assert pickle.loads(pickle.dumps(store)).row(1)["input_ids"].tolist() == [20_000, 20_001, 20_002]
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer).row(1)['input_ids'].tolist())"
    done = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(store), capture_output=True, check=True)
    assert json.loads(done.stdout) == [20_000, 20_001, 20_002]
