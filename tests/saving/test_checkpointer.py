"""Which checkpoints are kept, and the buffers in them. Runs of `tests/runs` and `tests/integration` save and resume."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from hwopt.saving.best_model import BestModel
from hwopt.saving.checkpointer import Checkpointer, load_buffers, persistent_buffers
from hwopt.saving.reader import STATE


def write_folder(path: Path, **content: Any) -> None:
    path.mkdir()
    (path / STATE).write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("limit", "best_is_final", "kept"),
    [
        (2, False, {"checkpoint-4", "checkpoint-5", "best-3", "best-9"}),
        (1, True, {"checkpoint-5", "best-3"}),
        (0, False, {"checkpoint-3", "checkpoint-4", "checkpoint-5", "best-1", "best-3", "best-9"}),
    ],
)
def test_prune_keeps_the_newest_and_the_weights_that_they_refer_to(
    limit: int, best_is_final: bool, kept: set[str], tmp_path: Path
) -> None:
    for step, best in ((3, 1), (4, 3), (5, 3)):
        write_folder(tmp_path / f"checkpoint-{step}", format=1, step=step, best_step=best, state={})
    for step in (1, 3, 9):
        write_folder(tmp_path / f"best-{step}")
    run: Any = SimpleNamespace(
        folder=tmp_path, is_main=True, recipe=SimpleNamespace(state=[]), training=SimpleNamespace(save_total_limit=limit)
    )
    best_weights: Any = SimpleNamespace(step=9)
    Checkpointer(run, SimpleNamespace(), best_weights, {}).prune(best_is_final)
    assert {path.name for path in tmp_path.iterdir()} == kept


def test_buffers_are_restored_by_name() -> None:
    trained, fresh = torch.nn.BatchNorm1d(2), torch.nn.BatchNorm1d(2)
    trained(torch.randn(8, 2))
    saved = {name: buffer.clone() for name, buffer in persistent_buffers(trained).items()}
    del saved["num_batches_tracked"]
    load_buffers(fresh, saved)
    assert torch.equal(fresh.running_mean, trained.running_mean)
    assert int(fresh.num_batches_tracked) == 0


def test_of_equal_metrics_the_lower_loss_is_the_best(tmp_path: Path) -> None:
    run = MagicMock(step=0, folder=tmp_path, is_main=False)
    best = BestModel(run, MagicMock(), "eval_f1", True)
    kept = []
    for run.step, (f1, loss) in enumerate([(0.5, 0.9), (0.5, 0.8), (0.5, 0.8), (0.4, 0.1), (0.6, 2.0), (0.6, math.nan)], 1):
        if best.consider({"eval_f1": f1, "eval_loss": loss}):
            kept.append(run.step)
    assert kept == [1, 2, 5]
    assert best.step == 5
