"""Out of memory on one of two real ranks under the real launcher: both finish with the right weights, or both end."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from hwopt.distributed.data_parallel import DataParallelEngine, make_buckets
from hwopt.testing import TINY_BERT, write_samples

SCRIPT = '''
"""Trains job.toml; on one rank the model runs out of memory where argv says, inside forward or backward as allocators do."""
import os, sys, warnings
from pathlib import Path
import torch
from hwopt import api
from hwopt.system import signals
from hwopt.system.ranks import rank_and_world
from hwopt.plugin import Decision, Plugin, Stage
from hwopt.plugin.registry import Registry
from hwopt.report.terminal import Screen
from rich.console import Console

warnings.simplefilter("ignore")
name, where, unlucky, begin, end = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
rank, world = rank_and_world(os.environ)

class Shortage(Plugin):
    name, stage, slots = "shortage", Stage.MODEL, ("model_steps",)

    def probe(self, context):
        return Decision.apply("for the test")

    def apply(self, recipe, context):
        recipe.model_steps.append(self.watch)

    def watch(self, model, run):
        self.calls = 0
        model.get_input_embeddings().register_forward_hook(self.forward)
        return model

    def forward(self, module, inputs, output):
        if (where == "evaluation") == module.training:
            return
        self.calls += 1
        short = rank == unlucky and begin <= self.calls < end
        if short and where == "backward":
            output.register_hook(self.fail)  # all layers above have their gradients already
        elif short:
            self.fail(None)

    def fail(self, gradient):
        if where == "forward" and name == "broken":
            raise ValueError("a bug on one rank")
        if name == "killed":
            os.kill(os.getpid(), 9)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more than there is.")

signals.install_handlers()
registry = Registry()
registry.add(Shortage)
plan = api.resolve("./ranks.toml", "job.toml", world_size=world, registry=registry)
from hwopt.errors import HwoptError
try:
    api.execute(plan, Path("runs") / name, Screen(Console(width=300)))
except HwoptError as error:
    print(f"rank {rank}: {error}", flush=True)
    sys.exit(error.exit_code)
'''
PROFILE = """name = "ranks"
[plugins.shortage]
[plugins.precision]
PRECISION
[plugins.batch]
train = 3
effective = 12
"""
TRAINING = "max_steps = 6\nlearning_rate = 1e-3\nlogging_steps = 1\neval_steps = 3\n"


def write_all(folder: Path, precision: str) -> None:
    write_samples(folder / "train.jsonl", 41)
    write_samples(folder / "dev.jsonl", 13, seed=1)
    pairs = ", ".join(f"{key} = {json.dumps(value)}" for key, value in TINY_BERT.items())
    data = '[data]\ntrain = "train.jsonl"\neval = "dev.jsonl"\nmax_length = 32\n'
    (folder / "job.toml").write_text(f"[model]\nconfig = {{ {pairs} }}\n{data}[training]\n{TRAINING}")
    (folder / "ranks.toml").write_text(PROFILE.replace("PRECISION", precision))
    (folder / "train.py").write_text(SCRIPT)


def launch(folder: Path, name: str, where: str = "nowhere", unlucky: int = 1, begin: int = 0, end: int = 0) -> str:
    import sys

    launcher = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--multi_gpu", "--num_processes", "2"]
    neutral = ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    done = subprocess.run(
        [*launcher, *neutral, "train.py", name, where, str(unlucky), str(begin), str(end)],
        cwd=folder,
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HWOPT_CACHE": str(folder / "cache")},
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        timeout=300,
    )
    return done.stdout + done.stderr


def weights(folder: Path) -> torch.Tensor:
    found = load_file(folder / "final" / "model.safetensors")
    # key.bias has a true gradient of 0: Adam turns the rounding noise there into steps of the learning rate
    return torch.cat([value.flatten().double() for name, value in sorted(found.items()) if not name.endswith("key.bias")])


def losses(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row.get("loss", row.get("eval_loss")) for row in rows]


@pytest.mark.parametrize(
    ("precision", "limit"), [('dtype = "fp32"', 1e-6), ('dtype = "bf16"\nlevel = "O2"', 2e-2)], ids=["fp32", "O2"]
)
def test_one_rank_recovers_and_both_are_right(precision: str, limit: float, tmp_path: Path) -> None:
    write_all(tmp_path, precision)
    plain = launch(tmp_path, "plain")
    assert (tmp_path / "runs" / "plain" / "final").is_dir(), plain[-3000:]
    assert "out of memory" not in plain
    expected = weights(tmp_path / "runs" / "plain")
    # 2 micro-batches a step on each rank: call 4 is the last one of step 2, while the other rank is done with its own
    cases = {"late": ("backward", 1, 4, 5), "early": ("forward", 0, 1, 2), "eval": ("evaluation", 1, 1, 2)}
    for name, case in cases.items():
        said = launch(tmp_path, name, *case)
        folder = tmp_path / "runs" / name
        assert json.loads((folder / "status.json").read_text())["exit_code"] == 0, said[-3000:]
        unlucky, what = case[1], "Evaluation" if name == "eval" else "Training"
        assert f"{what} ran out of memory {f'on rank {unlucky}' if unlucky else 'at step'}" in said
        assert losses(folder) == pytest.approx(losses(tmp_path / "runs" / "plain"), rel=max(limit, 1e-5))
        assert (weights(folder) - expected).norm() <= limit * expected.norm()


def test_a_rank_that_cannot_go_on_ends_both(tmp_path: Path) -> None:
    write_all(tmp_path, 'dtype = "fp32"')
    # the first evaluation is the rehearsal with the longest samples, the second one comes after step 3
    for where, begin in (("backward", 3), ("evaluation", 1), ("evaluation", 2)):
        name = f"{where}-{begin}"
        said = launch(tmp_path, name, where, 1, begin, 10_000)
        assert "not even row by row" in said
        assert "rank 1 ended with exit code 7" in said
        assert json.loads((tmp_path / "runs" / name / "status.json").read_text())["exit_code"] == 7


@pytest.mark.parametrize("name", ["broken", "killed"])
def test_a_rank_that_fails_otherwise_leaves_nobody_waiting(name: str, tmp_path: Path) -> None:
    write_all(tmp_path, 'dtype = "fp32"')
    said = launch(tmp_path, name, "forward", 1, 3, 4)
    assert json.loads((tmp_path / "runs" / name / "status.json").read_text())["exit_code"] in (1, 9, 143)
    assert "a bug on one rank" in said or name == "killed"


def test_gradients_of_all_kinds_meet(tmp_path: Path) -> None:
    """One rank adds nothing of its own: absent gradients stay absent, those of others come as zeros, no value changes."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    try:
        sizes = [(3, torch.float32), (5, torch.float16), (7, torch.float32), (40, torch.float32), (2, torch.float32)]
        parameters = [torch.nn.Parameter(torch.zeros(size, dtype=dtype)) for size, dtype in sizes]
        for parameter in parameters[:4]:
            parameter.grad = torch.randn(len(parameter)).to(parameter.dtype)
        expected = [None if p.grad is None else p.grad.clone() for p in parameters]
        engine = DataParallelEngine.__new__(DataParallelEngine)
        engine.trained, engine.buckets = parameters, list(make_buckets(parameters, 64))
        engine.has_gradient = torch.tensor([1, 1, 1, 1, 0])
        engine.reduce()
        for parameter, value in zip(parameters, expected, strict=True):
            assert (parameter.grad is None) == (value is None)
            assert value is None or torch.equal(parameter.grad, value)  # type: ignore[arg-type]
        engine.has_gradient[4] = 1  # another rank has one
        engine.reduce()
        assert torch.equal(parameters[4].grad, torch.zeros(2))  # type: ignore[arg-type]
    finally:
        dist.destroy_process_group()


@given(st.lists(st.tuples(st.integers(1, 50), st.booleans()), max_size=20), st.integers(4, 200))
def test_buckets_hold_every_tensor_once_in_order(sizes: list[tuple[int, bool]], most: int) -> None:
    tensors = [torch.empty(size, dtype=torch.float32 if full else torch.float16) for size, full in sizes]
    buckets = list(make_buckets(tensors, most))
    assert [id(tensor) for bucket in buckets for tensor in bucket] == [id(tensor) for tensor in tensors]
    for bucket in buckets:
        assert len({tensor.dtype for tensor in bucket}) == 1
        assert len(bucket) == 1 or sum(tensor.numel() * tensor.element_size() for tensor in bucket) <= most
