"""Run folders for tests of reports: the files that a run writes, with figures of choice."""

import copy
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hwopt.records.run_files import PROCESSES
from hwopt.records.run_record import RunRecord
from hwopt.runs.record import read_record

PLAN: dict[str, Any] = {
    "profile": "tiny",
    "hardware": {"device_type": "cpu", "name": "a CPU", "memory_gib": 16.0, "count": 1, "cpu_cores": 2},
    "software": {"torch": "2.13.0"},
    "model": {"name": "bert (random)", "architecture": "BertForSequenceClassification", "parameters": 1_454_210},
    "job": {"model": {"name": None}, "data": {"train": "train.jsonl"}, "task": {"kind": "text-classification"}},
    "training": {"learning_rate": 1e-3, "seed": 42},
    "batch": {"train": 8, "eval": 16, "step": 16, "accumulation": 2},
    "world_size": 1,
    "plugins": [
        {"name": "precision", "decision": "apply", "reason": "bf16", "options": {"dtype": "bf16"}},
        {"name": "tf32", "decision": "skip", "reason": "no card", "options": {"enabled": True}},
    ],
    "provenance": {"training.seed": "default"},
    "notes": ["a note"],
}
MEMORY = {
    "parts": {"weights": 0.5, "gradients": 0.5, "optimizer_state": 1.0, "masters": 0.0, "activations": 1.75, "temporary": 0.25},
    "time": {"step": [0.1, 0.2], "epoch": [10.0, 20.0], "total": [30.0, 60.0], "basis": "estimated from the card's peak speeds"},
}
MEMORY |= {"tier": "traced", "error": "median 1 %", "rows": 8, "width": 128, "largest_train": 4_096}
MEMORY |= {"peak_gib": 4.0, "eval_peak_gib": 2.0, "free_gib": 7.5, "fits": True, "margin_gib": 2.5, "host_fits": True}
PROCESS = {"started": "2026-11-22T12:00:00+00:00", "command": "hwopt run job.toml --profile tiny", "folder": "/work"}
PROCESS |= {"hwopt": "0.1.0", "python": "3.11.7", "operating_system": "Linux"}
PROCESS |= {"step": 0, "total_steps": 100, "steps_per_epoch": 50, "samples": 800}
PROCESS |= {"data": {"train": "abc", "eval": "def"}, "metric_directions": {"loss": False, "f1": True}}
EVIDENCE = [{"name": "precision", "status": "active", "seen": "12 of 16 matmuls in bf16"}]


def log_row(step: int, speed: float = 100.0, **values: Any) -> dict[str, Any]:
    """A log point at `speed` samples per second, with 16 samples and 320 tokens a step."""
    row = {"step": step, "epoch": step / 50, "time": step / 10, "learning_rate": 1e-3, "loss": 2.0 - step / 100, "grad_norm": 1.5}
    row |= {"steps_per_second": speed / 16, "samples_per_second": speed, "tokens_per_second": 20 * speed}
    return row | {"data_wait": 0.01, "peak_memory_gib": 3.5} | values


def log_rows(number: int = 20, speed: float = 100.0, noise: float = 0.02, seed: int = 0) -> list[dict[str, Any]]:
    """`number` log points, 5 steps apart, the first one slow. `noise`: the standard deviation of the logarithm of the speed."""
    draw = random.Random(seed)
    speeds = [speed / 10, *(speed * math.exp(draw.gauss(0, noise)) for _ in range(number - 1))]
    return [log_row(5 * (index + 1), each) for index, each in enumerate(speeds)]


def eval_row(step: int, **metrics: float) -> dict[str, Any]:
    return {"step": step, "epoch": step / 50, "eval_runtime": 1.0, "eval_samples_per_second": 100.0} | {
        f"eval_{name}": value for name, value in metrics.items()
    }


def changed(table: dict[str, Any], **keys: Any) -> dict[str, Any]:
    """A copy of `table`; `a__b=1` sets the key b of its table a."""
    made = copy.deepcopy(table)
    for dotted, value in keys.items():
        *tables, key = dotted.split("__")
        inner = made
        for name in tables:
            inner = inner[name]
        inner[key] = value
    return made


def write_run(
    folder: Path,
    rows: Sequence[dict[str, Any]] = (),
    *,
    plan: dict[str, Any] = PLAN,
    processes: Sequence[dict[str, Any]] = (PROCESS,),
    status: tuple[int | None, str] | None = (0, "done"),
    **files: Any,
) -> Path:
    """`folder`, with the files of a run. `files`: the content of summary, evidence or memory."""
    folder.mkdir(parents=True)
    contents = {"plan": plan, "evidence": {"plugins": EVIDENCE}} | files
    if status is not None:
        contents["status"] = {"exit_code": status[0], "message": status[1]}
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    for name, lines in (("metrics.jsonl", rows), (PROCESSES, processes)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def record_of(folder: Path, rows: Sequence[dict[str, Any]] = (), **options: Any) -> RunRecord:
    """The record of such a folder."""
    return read_record(write_run(folder, rows, **options))
