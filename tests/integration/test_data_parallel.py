"""Out of memory, NaN and errors on one of two real ranks: both finish with the right weights, or both end."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from applied import Applied
from cases import named
from integration.forks import forked_ranks, wait_for_exit
from integration.ranks_folder import BATCH, write_job, write_profile
from rich.console import Console
from safetensors.torch import load_file

from hwopt import api
from hwopt.errors import HwoptError
from hwopt.plugin import Context, Recipe
from hwopt.plugin.registry import Registry
from hwopt.records.run_files import status_code
from hwopt.report.screen import Screen
from hwopt.system import signals
from hwopt.testing import logged, relative_error

WEIGHTS = "final/model.safetensors"


class Shortage(Applied):
    """Raises out of memory at some calls of the embeddings, in forward or in backward, as the allocator does."""

    name = "shortage"
    _case: ClassVar[Case]

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

    def fail(self, gradient: Any) -> Any:
        if self._case.how == "not finite":
            return gradient * math.nan
        if self._case.how == "broken":
            raise ValueError("a bug on one rank")
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more than there is.")


@dataclass(frozen=True)
class Case:
    """The rank that fails, its first and last failing call, and the kind of failure."""

    where: str = "nowhere"
    failing_rank: int = 1
    begin: int = 0
    end: int = 0
    how: str = "out of memory"


def write_all(folder: Path, **precision: str) -> None:
    write_job(folder, max_steps=6, eval_steps=3, on_nonfinite="skip")
    write_profile(folder, {"shortage": {}, "precision": precision or {"dtype": "fp32"}, "batch": BATCH})


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


def losses(folder: Path) -> list[float]:
    return logged(folder, "loss") + logged(folder, "eval_loss")


PRECISIONS = {"fp32": ({}, 1e-6), "O2": ({"dtype": "bf16", "level": "O2"}, 2e-2)}


@pytest.mark.parametrize("case", named(PRECISIONS, ("fp32",)))
def test_one_rank_recovers_from_oom_with_correct_weights(case: tuple[dict[str, str], float], warm: None, tmp_path: Path) -> None:
    precision, limit = case
    write_all(tmp_path, **precision)
    codes, plain = train(tmp_path, "plain")
    assert codes == [0, 0], plain[-3000:]
    assert "out of memory" not in plain
    expected = load_file(tmp_path / "runs" / "plain" / WEIGHTS)
    # 2 micro-batches a step on each rank: call 4 is the last one of step 2, when the other rank has finished
    cases = {"late": Case("backward", 1, 4, 5), "early": Case("forward", 0, 1, 2), "eval": Case("evaluation", 1, 1, 2)}
    for name, failing in cases.items():
        codes, output = train(tmp_path, name, failing)
        folder = tmp_path / "runs" / name
        assert codes == [0, 0], output[-3000:]
        assert status_code(tmp_path / "runs" / name) == 0
        what = "Evaluation" if name == "eval" else "Training"
        assert f"{what} ran out of memory{' on rank 1:' if failing.failing_rank else ' at step '}" in output
        assert losses(folder) == pytest.approx(losses(tmp_path / "runs" / "plain"), rel=max(limit, 1e-5))
        assert relative_error(load_file(folder / WEIGHTS), expected) <= limit


def test_rank_that_cannot_recover_ends_both(warm: None, tmp_path: Path) -> None:
    write_all(tmp_path)
    codes, output = train(tmp_path, "short", Case("backward", 1, 3, 10_000))
    assert "not even row by row" in output
    assert "rank 1 ended with exit code 7" in output
    assert (codes, status_code(tmp_path / "runs" / "short")) == ([7, 7], 7)


def test_other_failure_of_a_rank_ends_both(warm: None, tmp_path: Path) -> None:
    """The other rank reports a lost connection. Under a launcher, the launcher's report replaces that."""
    write_all(tmp_path)
    codes, output = train(tmp_path, "broken", Case("forward", 1, 3, 4, "broken"))
    assert (codes, status_code(tmp_path / "runs" / "broken")) == ([9, 1], 1), output[-3000:]
    assert "a bug on one rank" in output


def test_all_ranks_skip_an_update_that_is_not_finite_on_one(warm: None, tmp_path: Path) -> None:
    write_all(tmp_path)
    codes, output = train(tmp_path, "skipped", Case("backward", 1, 3, 4, "not finite"))
    assert codes == [0, 0], output[-3000:]
    assert logged(tmp_path / "runs" / "skipped", "skipped_updates") == [1] * 5  # from step 2 on
    saved = load_file(tmp_path / "runs" / "skipped" / WEIGHTS)
    assert all(torch.isfinite(value).all() for value in saved.values())
