"""A folder with a tiny job for several ranks. The ranks are forks of the test process (forks.py)."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from integration.forks import run_ranks
from safetensors.torch import load_file

from hwopt.testing import TINY_BERT, logged, relative_error, write_samples

RUN = ["run", "job.toml", "--profile", "./ranks.toml"]
BATCH = {"train": 3, "effective": 12}
FP32 = {"precision": {"dtype": "fp32"}, "batch": BATCH}


def write_job(
    folder: Path,
    config: Mapping[str, Any] = TINY_BERT,
    kind: str = "text-classification",
    data: Mapping[str, Any] = {},
    task: Mapping[str, Any] = {},
    **training: Any,
) -> None:
    """Write job.toml and its data. 41 samples: the last step of an epoch is partial."""
    write_samples(folder / "train.jsonl", 41)
    write_samples(folder / "dev.jsonl", 13, seed=1)
    tables = {
        "model": {"config": config},
        "data": {"train": "train.jsonl", "eval": "dev.jsonl", "max_length": 32, **data},
        "task": {"kind": kind, **task},
        "training": {"learning_rate": 1e-3, "logging_steps": 1, **training},
    }
    (folder / "job.toml").write_text(tomlkit.dumps(tables))


def write_profile(folder: Path, plugins: Mapping[str, Mapping[str, Any]] = FP32, name: str = "ranks") -> None:
    (folder / f"{name}.toml").write_text(tomlkit.dumps({"name": name, "plugins": plugins}))


def train(
    folder: Path, name: str, ranks: int = 1, *arguments: str, code: int = 0, first: Callable[[], None] = lambda: None
) -> Path:
    """The folder of the run `name`, which ends with `code` on every rank. Each rank calls `first` before."""
    output = folder / f"{name}.out"
    codes = run_ranks([*RUN, "--name", name, *arguments], ranks, folder, output, first)
    assert codes == [code] * ranks, output.read_text()[-3000:]
    run = folder / "runs" / name
    assert json.loads((run / "status.json").read_text())["exit_code"] == code
    return run


def evidence(run: Path) -> dict[str, str]:
    """Plugin -> "active", "inactive" or "unknown"."""
    return {row["name"]: row["status"] for row in json.loads((run / "evidence.json").read_text())["plugins"]}


def check_equal(
    ours: Path, theirs: Path, ranks: int, saved: tuple[str, ...] = ("final",), limit: float = 1e-6, rows: float = 1e-5
) -> None:
    """The run `ours` on several ranks has the logs and weights of the run `theirs` on one, up to rounding."""
    assert json.loads((ours / "plan.json").read_text())["world_size"] == ranks
    for key in ("loss", "grad_norm", "eval_loss"):
        assert logged(ours, key) == pytest.approx(logged(theirs, key), rel=rows), key
    for name in saved:
        assert relative_error(*(load_file(run / name / "model.safetensors") for run in (ours, theirs))) <= limit
        configs = [json.loads((run / name / "config.json").read_text()) for run in (ours, theirs)]
        assert configs[0] == configs[1]
    found = evidence(ours)
    found.pop("length_batching", None)  # with so few rows it saves no tokens on some ranks
    assert set(found.values()) == {"active"}, found
