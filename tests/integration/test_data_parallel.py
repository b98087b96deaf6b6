"""Out of memory on one of two real ranks: both finish with the right weights, or both end."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from integration.forks import forked_ranks, wait_for_exit
from rich.console import Console
from safetensors.torch import load_file

from hwopt import api
from hwopt.errors import HwoptError
from hwopt.plugin import Context, Decision, Plugin, Recipe, Stage
from hwopt.plugin.registry import Registry
from hwopt.report.screen import Screen
from hwopt.system import signals
from hwopt.testing import TINY_BERT, write_samples


class Shortage(Plugin):
    """Raises out of memory at some calls of the embeddings, in forward or in backward, as the allocator does."""

    name, stage = "shortage", Stage.MODEL
    _case: ClassVar[Case]

    def probe(self, context: Context) -> Decision:
        return Decision.apply("for the test")

    def apply(self, recipe: Recipe, context: Context) -> None:
        recipe.model_steps.append(self.watch)

    def watch(self, model: Any, run: Any) -> Any:
        self.calls = 0
        model.get_input_embeddings().register_forward_hook(self.forward)
        return model

    def forward(self, module: Any, inputs: Any, output: Any) -> None:
        case = self._case
        if (case.where == "evaluation") == module.training:
            return
        self.calls += 1
        short = int(os.environ["RANK"]) == case.failing_rank and case.begin <= self.calls < case.end
        if short and case.where == "backward":
            output.register_hook(self.fail)  # the layers above have gradients already
        elif short:
            self.fail(None)

    def fail(self, gradient: Any) -> None:
        if self._case.how == "broken":
            raise ValueError("a bug on one rank")
        if self._case.how == "killed":
            os.kill(os.getpid(), 9)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more than there is.")


@dataclass(frozen=True)
class Case:
    """The rank that fails, its first and last failing call, and the kind of failure."""

    where: str = "nowhere"
    failing_rank: int = 1
    begin: int = 0
    end: int = 0
    how: str = "out of memory"


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


def train(folder: Path, name: str, case: Case = Case()) -> tuple[list[int], str]:
    """The exit codes of two ranks and their output."""

    def work(rank: int) -> None:
        signals.install_handlers()
        Shortage._case = case
        registry = Registry()
        registry.add(Shortage)
        plan = api.resolve("./ranks.toml", "job.toml", world_size=2, registry=registry, cache=folder / "cache")
        try:
            api.execute(plan, Path("runs") / name, Screen(Console(width=300)), cache=folder / "cache")
        except HwoptError as error:
            print(f"rank {rank}: {error}", flush=True)
            raise

    output = folder / f"{name}.out"
    codes = [wait_for_exit(pid) for pid in forked_ranks(work, 2, folder, output)]
    return codes, output.read_text()


def status(folder: Path, name: str) -> int:
    found: int = json.loads((folder / "runs" / name / "status.json").read_text())["exit_code"]
    return found


def weights(folder: Path) -> torch.Tensor:
    found = load_file(folder / "final" / "model.safetensors")
    # the gradient of key.bias is 0 in exact arithmetic; Adam turns its rounding noise into full steps
    return torch.cat([value.flatten().double() for name, value in sorted(found.items()) if not name.endswith("key.bias")])


def losses(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row.get("loss", row.get("eval_loss")) for row in rows]


@pytest.mark.parametrize(
    ("precision", "limit"),
    [
        pytest.param('dtype = "fp32"', 1e-6, id="fp32"),
        pytest.param('dtype = "bf16"\nlevel = "O2"', 2e-2, id="O2", marks=pytest.mark.soak),
    ],
)
def test_one_rank_recovers_from_oom_with_correct_weights(precision: str, limit: float, warm: None, tmp_path: Path) -> None:
    write_all(tmp_path, precision)
    codes, plain = train(tmp_path, "plain")
    assert codes == [0, 0], plain[-3000:]
    assert "out of memory" not in plain
    expected = weights(tmp_path / "runs" / "plain")
    # 2 micro-batches a step on each rank: call 4 is the last one of step 2, when the other rank has finished
    cases = {"late": Case("backward", 1, 4, 5), "early": Case("forward", 0, 1, 2), "eval": Case("evaluation", 1, 1, 2)}
    for name, case in cases.items():
        codes, output = train(tmp_path, name, case)
        folder = tmp_path / "runs" / name
        assert codes == [0, 0], output[-3000:]
        assert status(tmp_path, name) == 0
        what = "Evaluation" if name == "eval" else "Training"
        assert f"{what} ran out of memory{' on rank 1:' if case.failing_rank else ' at step '}" in output
        assert losses(folder) == pytest.approx(losses(tmp_path / "runs" / "plain"), rel=max(limit, 1e-5))
        assert (weights(folder) - expected).norm() <= limit * expected.norm()


@pytest.mark.parametrize(
    ("where", "begin"),
    # the first evaluation is the preflight with the longest samples, the second one follows step 3
    [
        ("backward", 3),
        pytest.param("evaluation", 1, marks=pytest.mark.soak),
        pytest.param("evaluation", 2, marks=pytest.mark.soak),
    ],
)
def test_rank_that_cannot_recover_ends_both(where: str, begin: int, warm: None, tmp_path: Path) -> None:
    write_all(tmp_path, 'dtype = "fp32"')
    codes, output = train(tmp_path, "short", Case(where, 1, begin, 10_000))
    assert "not even row by row" in output
    assert "rank 1 ended with exit code 7" in output
    assert (codes, status(tmp_path, "short")) == ([7, 7], 7)


@pytest.mark.parametrize(("how", "code"), [("broken", 1), ("killed", -9)])
def test_other_failure_of_a_rank_ends_both(how: str, code: int, warm: None, tmp_path: Path) -> None:
    """The other rank reports a lost connection. Under a launcher, the launcher's report replaces that."""
    write_all(tmp_path, 'dtype = "fp32"')
    codes, output = train(tmp_path, how, Case("forward", 1, 3, 4, how))
    assert (codes, status(tmp_path, how)) == ([9, code], 1 if how == "broken" else 9), output[-3000:]
    assert ("a bug on one rank" in output) == (how == "broken")
