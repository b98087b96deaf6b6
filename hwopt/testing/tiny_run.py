"""Tiny real jobs, profiles and runs for tests of plugins, and comparisons of the runs' results."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from hwopt import api
from hwopt.config.job import JobFile, make_job
from hwopt.config.profile import Profile, make_profile
from hwopt.config.task_kinds import task_facts
from hwopt.config.toml import Document
from hwopt.data.tokenizer_training import planned_config
from hwopt.hardware.detect import detect, detect_software
from hwopt.model.config import load_config
from hwopt.model.facts import model_facts
from hwopt.planning.plan import Plan
from hwopt.planning.resolve import resolve
from hwopt.plugin import Evidence
from hwopt.plugin.registry import Registry
from hwopt.records.run_files import SUMMARY
from hwopt.runs.folder import write_status
from hwopt.saving import reader as resume
from hwopt.system.cache import cache_folder
from hwopt.training.listener import Listener, Row, Summary

__all__ = [
    "COLOURS",
    "TINY_BERT",
    "TINY_LLAMA",
    "TINY_T5",
    "TINY_VIT",
    "WORDS",
    "Recorder",
    "finished",
    "launcher",
    "logged",
    "plan_for",
    "relative_error",
    "rewound",
    "saved_bits",
    "tiny_job",
    "tiny_profile",
    "train_tiny",
    "write_photos",
    "write_samples",
]

COLOURS = ("red", "green", "blue")
WORDS = (*COLOURS, "one", "two", "three", "four", "five", "up", "down", "left", "right", "hot", "cold", "old", "new", "big")

SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
TINY_BERT = SIZES | {
    "model_type": "bert",
    "vocab_size": 64,
    "intermediate_size": 128,  # 8-bit optimizers leave tensors under 4,096 elements alone
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
TINY_LLAMA = SIZES | {
    "model_type": "llama",
    "vocab_size": 300,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
TINY_VIT = SIZES | {"model_type": "vit", "intermediate_size": 128, "image_size": 16, "patch_size": 8}
T5_SIZES = {"vocab_size": 300, "d_model": 32, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
TINY_T5 = {"model_type": "t5"} | T5_SIZES


def write_photos(folder: Path, number: int, *, seed: int = 0) -> Path:
    """`folder`, with `number` noisy images of different sizes in the folders "dark" and "light". Needs Pillow."""
    import numpy as np
    from PIL import Image

    random_pixels = np.random.default_rng(seed)
    for index in range(number):
        label = ("dark", "light")[index % 2]
        (folder / label).mkdir(parents=True, exist_ok=True)
        size = (*random_pixels.integers(12, 40, 2), 3)
        pixels = random_pixels.integers(0, 128, size) + (128 if label == "light" else 0)
        Image.fromarray(pixels.astype(np.uint8)).save(folder / label / f"{index}.png")
    return folder


def write_samples(path: Path, number: int, *, pairs: bool = False, seed: int = 0) -> Path:
    """`path`, a JSONL file with `number` texts of different lengths. The label says whether the first word is a colour."""
    random_words = random.Random(seed)
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(number):
            words = random_words.choices(WORDS, k=random_words.randint(2, 24))
            half = len(words) // 2
            row = {"text": " ".join(words[:half] if pairs else words), "label": "colour" if words[0] in COLOURS else "other"}
            if pairs:
                row["second"] = " ".join(words[half:])
            file.write(json.dumps(row) + "\n")
    return path


def tiny_job(
    folder: Path,
    kind: str = "text-classification",
    *,
    samples: int = 40,
    config: Mapping[str, Any] | None = None,
    data: Mapping[str, Any] | None = None,
    **training: Any,
) -> JobFile:
    """A job of a few steps with a randomly initialized model; `config` is by default a tiny one for the kind of the task.

    `data`: further keys of the table [data].
    """
    folder.mkdir(parents=True, exist_ok=True)
    images = kind == "image-classification"
    write, end = (write_photos, "") if images else (write_samples, ".jsonl")
    table: dict[str, Any] = {"train": str(write(folder / f"train{end}", samples))}
    table["eval"] = str(write(folder / f"eval{end}", 12, seed=1))
    if not images:
        table["max_length"] = 32
    if kind == "seq2seq-lm":
        table |= {"prompt": "text", "completion": "label", "max_target_length": 12}
    table |= dict(data or {})
    settings = {"max_steps": 3, "learning_rate": 1e-3, "logging_steps": 1} | training
    others = {"image-classification": TINY_VIT, "seq2seq-lm": TINY_T5}
    config = config or others.get(kind) or (TINY_LLAMA if task_facts(kind).decoder else TINY_BERT)
    return make_job(
        Document("a tiny job", {"model": {"config": dict(config)}, "data": table, "task": {"kind": kind}, "training": settings})
    )


def tiny_profile(**plugins: Mapping[str, Any]) -> Profile:
    """A profile with the plugin tables `plugins`, and with step batches of 8 rows in micro-batches of 4."""
    tables = {"batch": {"train": 4, "gradient_accumulation_steps": 2}} | {name: dict(table) for name, table in plugins.items()}
    return make_profile(Document("a tiny profile", {"name": "tiny", "plugins": tables}))


def plan_for(
    profile: Profile, job_file: JobFile, registry: Registry | None = None, *, world_size: int = 1, **options: Any
) -> Plan:
    """The plan of `profile` and `job_file` on `hardware`, by default this machine."""
    model = job_file.job.model
    config = planned_config(job_file.job, load_config(model.name, model.config))
    facts = model_facts(config, task_facts(job_file.job.task.kind), model.label, cache_folder() / "models")
    hardware = options.pop("hardware", None) or detect()
    return resolve(
        profile, hardware, job_file, registry or Registry(), facts, detect_software(), world_size=world_size, **options
    )


class Recorder(Listener):
    """A listener that keeps the metrics, evidence, notes, warnings and summary of a run."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.found: list[tuple[Any, Evidence]] = []
        self.found_at_end: list[tuple[Any, Evidence]] = []
        self.warnings: list[str] = []
        self.messages: list[str] = []
        self.summary: Summary = {}
        self.run: Any = None

    def on_start(self, run: Any) -> None:
        self.run = run

    def on_evidence(self, run: Any, found: list[Any]) -> None:
        self.found = found

    def on_final_evidence(self, run: Any, found: list[Any]) -> None:
        self.found_at_end = found

    def on_log(self, run: Any, row: Row) -> None:
        self.rows.append(row)

    def on_message(self, run: Any, message: str) -> None:
        self.messages.append(message)

    def on_finish(self, run: Any, summary: Summary) -> None:
        self.summary = summary

    def on_warning(self, run: Any, message: str) -> None:
        self.warnings.append(message)

    @property
    def losses(self) -> list[float]:
        return [row["loss"] for row in self.rows if "loss" in row]


def train_tiny(plan: Plan, folder: Path, recorder: Recorder | None = None) -> Recorder:
    """Train `plan` in `folder`, and return the recorder of the run."""
    recorder = recorder or Recorder()
    api.execute(plan, folder / "run", recorder, cache=folder / "cache")
    return recorder


def rewound(run: Path, target: Path, step: int) -> Path:
    """A copy of the run folder `run`, in the state in which a process killed after `step` leaves it."""
    shutil.copytree(run, target)
    for path in resume.list_checkpoints(target):
        if int(path.name.rsplit("-", 1)[1]) > step:
            shutil.rmtree(path)
    shutil.rmtree(target / "final", ignore_errors=True)
    (target / SUMMARY).unlink(missing_ok=True)
    write_status(target, None, "running")
    return target


def saved_bits(folder: Path) -> dict[str, str]:
    """File and tensor name -> SHA-256 of the tensor, for a checkpoint or for final/."""
    return {
        f"{path.name}/{name}": hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def launcher(ranks: int) -> list[str]:
    """An `accelerate launch` command for `ranks` ranks. Append the arguments (`-m hwopt …`) or a script."""
    given = f"--num_processes {ranks} --num_machines 1 --mixed_precision no --dynamo_backend no --main_process_port 0"
    return [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--multi_gpu", *given.split()]


def finished(command: Sequence[str | bytes], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The completed process of `command`, run on CPUs in `folder`."""
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
        stdin=subprocess.DEVNULL,
    )


def logged(run: Path, key: str) -> list[float]:
    """The values of `key` in the run's metrics, in the order of the log."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [row[key] for row in rows if key in row]


def relative_error(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """The norm of the difference of two models' weights, relative to the norm of `theirs`.

    Excludes key.bias: its exact gradient is 0, and Adam turns rounding noise in it into full steps.
    """
    assert ours.keys() == theirs.keys()
    names = [name for name in theirs if not name.endswith("key.bias")]
    difference = torch.cat([(ours[name] - theirs[name]).flatten() for name in names]).double().norm()
    return float(difference / torch.cat([theirs[name].flatten() for name in names]).double().norm())
