"""Two GPUs against one that holds the whole model: FSDP, ZeRO and data parallel."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hwopt.testing import TINY_LLAMA, logged, relative_error, write_samples

pytestmark = [
    pytest.mark.device("real"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason=f"{torch.cuda.device_count()} CUDA device(s), needs 2"),
]

LLAMA = TINY_LLAMA | {"vocab_size": 4000, "hidden_size": 512, "num_hidden_layers": 6, "intermediate_size": 1408}
LLAMA |= {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 256}
PROFILE = """name = "ranks"
[plugins.precision]
dtype = "{dtype}"
[plugins.optimizer]
[plugins.checkpointing]
[plugins.batch]
train = 4
effective = 24
eval = 8
[plugins.length_batching]
"""


def run(folder: Path, name: str, ranks: int, profile: str) -> Path:
    (folder / f"{name}.toml").write_text(profile)
    pairs = ", ".join(f"{key} = {json.dumps(value)}" for key, value in LLAMA.items())
    (folder / "job.toml").write_text(
        f'[model]\nconfig = {{ {pairs} }}\n[data]\ntrain = "train.jsonl"\neval = "dev.jsonl"\nmax_length = 64\n'
        '[task]\nkind = "causal-lm"\n[training]\nmax_steps = 12\nlearning_rate = 1e-4\nlogging_steps = 1\neval_steps = 5\n'
    )
    done = subprocess.run(
        [sys.executable, "-m", "hwopt", "run", "job.toml", "--profile", f"./{name}.toml", "--name", name]
        + (["--processes", str(ranks)] if ranks > 1 else []),
        cwd=folder,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return folder / "runs" / name


ACTIVE = {"precision", "optimizer", "checkpointing"}


@pytest.mark.device("any")
@pytest.mark.parametrize(
    ("table", "plugin"),
    [
        ("", "batch"),
        ("[plugins.fsdp]\n", "fsdp"),
        ('[plugins.zero]\nstage = 2\noffload = "none"\n', "zero"),
        ("[plugins.cuda_graphs]\ntokens = 0\n", "cuda_graphs"),
    ],
    ids=["data parallel", "fsdp", "zero", "graphs"],
)
def test_two_devices_train_and_prove_each_plugin(table: str, plugin: str, tmp_path: Path) -> None:
    write_samples(tmp_path / "train.jsonl", 500)  # several steps an epoch: the last step of one may be smaller
    write_samples(tmp_path / "dev.jsonl", 20, seed=1)
    profile = PROFILE.format(dtype="bf16")
    one, two = run(tmp_path, "one", 1, profile), run(tmp_path, "two", 2, profile + table)
    assert len(logged(two, "loss")) == len(logged(one, "loss")) == 12
    assert evidence_of(two)[plugin] == "active"
    assert {evidence_of(two)[name] for name in ACTIVE} == {"active"}
    if plugin == "fsdp":
        assert max(logged(two, "peak_memory_gib")) < max(logged(one, "peak_memory_gib"))


def evidence_of(folder: Path) -> dict[str, str]:
    """Plugin -> status of its evidence, in the run folder."""
    return {row["name"]: row["status"] for row in json.loads((folder / "evidence.json").read_text())["plugins"]}


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-4), ("bf16", 1e-2), ("fp16", 1e-2)])
@pytest.mark.parametrize("options", ["", 'reshard_after_forward = false\nreduce = "step"\n'], ids=["spread", "whole"])
def test_two_devices_match_one_device(dtype: str, tolerance: float, options: str, tmp_path: Path) -> None:
    write_samples(tmp_path / "train.jsonl", 100)
    write_samples(tmp_path / "dev.jsonl", 20, seed=1)
    profile = PROFILE.format(dtype=dtype)
    one, two = run(tmp_path, "one", 1, profile), run(tmp_path, "two", 2, f"{profile}[plugins.fsdp]\n{options}")
    assert logged(two, "loss") == pytest.approx(logged(one, "loss"), rel=tolerance)
    ours, theirs = (load_file(folder / "final" / "model.safetensors") for folder in (two, one))
    assert relative_error(ours, theirs) <= tolerance
    assert {evidence_of(two)[name] for name in ACTIVE | {"fsdp"}} == {"active"}
    if not options:
        assert max(logged(two, "peak_memory_gib")) < max(logged(one, "peak_memory_gib"))
