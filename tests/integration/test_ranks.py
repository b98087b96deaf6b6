"""Real ranks over gloo, and the settings of their launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from integration.forks import run_ranks
from safetensors.torch import load_file

from hwopt.testing import TINY_BERT, TINY_LLAMA, finished, logged, relative_error, write_samples

RUN = ["run", "job.toml", "--profile", "./ranks.toml"]
LAUNCH = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]


PROFILE = """name = "ranks"
[plugins.precision]
PRECISION
[plugins.batch]
train = 3
effective = 12
[plugins.length_batching]
"""


def write_job(folder: Path, kind: str, precision: str = 'dtype = "fp32"') -> None:
    write_samples(folder / "train.jsonl", 41)  # the last step of an epoch is partial
    write_samples(folder / "dev.jsonl", 13, seed=1)
    config = TINY_BERT if kind == "text-classification" else TINY_LLAMA
    pairs = ", ".join(f"{key} = {json.dumps(value)}" for key, value in config.items())
    (folder / "job.toml").write_text(
        f'[model]\nconfig = {{ {pairs} }}\n[data]\ntrain = "train.jsonl"\neval = "dev.jsonl"\nmax_length = 32\n'
        f'[task]\nkind = "{kind}"\n[training]\nmax_steps = 10\nlearning_rate = 1e-3\nlogging_steps = 1\neval_steps = 5\n'
    )
    (folder / "ranks.toml").write_text(PROFILE.replace("PRECISION", precision))


def start(ranks: int, folder: Path, name: str) -> Path:
    output = folder / f"{name}.out"
    assert run_ranks([*RUN, "--name", name], ranks, folder, output) == [0] * ranks, output.read_text()[-3000:]
    return folder / "runs" / name


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [("causal-lm", 2), ("text-classification", 4), pytest.param("text-classification", 2, marks=pytest.mark.soak)],
)
def test_several_ranks_match_one_rank(kind: str, ranks: int, warm: None, tmp_path: Path) -> None:
    """The effective batch is the same on any number of ranks. Of four ranks, each has one or two samples in the partial step."""
    write_job(tmp_path, kind)
    one = start(1, tmp_path, "one")
    several = start(ranks, tmp_path, "several")
    assert json.loads((several / "plan.json").read_text())["world_size"] == ranks
    assert logged(several, "loss") == pytest.approx(logged(one, "loss"), rel=1e-5)
    assert logged(several, "eval_loss") == pytest.approx(logged(one, "eval_loss"), rel=1e-5)
    ours, theirs = load_file(several / "final" / "model.safetensors"), load_file(one / "final" / "model.safetensors")
    assert relative_error(ours, theirs) <= 1e-6


@pytest.mark.soak
def test_half_weights_on_two_ranks(warm: None, tmp_path: Path) -> None:
    """Evaluations before and during training must not remove DDP's hooks from the half weights."""
    write_job(tmp_path, "text-classification", 'dtype = "bf16"\nlevel = "O2"\n')
    one = start(1, tmp_path, "one")
    two = start(2, tmp_path, "two")
    assert logged(two, "loss") == pytest.approx(logged(one, "loss"), rel=2e-2)
    assert logged(two, "eval_loss") == pytest.approx(logged(one, "eval_loss"), rel=2e-2)


@pytest.mark.soak
def test_launcher_without_settings_is_accepted(tmp_path: Path) -> None:
    write_job(tmp_path, "text-classification")
    done = finished([*LAUNCH, "--num_processes", "1", "-m", "hwopt", *RUN, "--name", "bare"], tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((tmp_path / "runs" / "bare" / "status.json").read_text())["exit_code"] == 0


def test_launcher_that_contradicts_the_plan_is_refused(tmp_path: Path) -> None:
    write_job(tmp_path, "text-classification")
    done = subprocess.run(
        [*LAUNCH, "--num_processes", "1", "--mixed_precision", "bf16", "-m", "hwopt", *RUN],
        cwd=tmp_path,
        env={**os.environ, "ACCELERATE_USE_CPU": "true"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "ACCELERATE_MIXED_PRECISION=bf16 contradicts the plan" in done.stderr
    assert not (tmp_path / "runs").exists()
