"""Metrics of regression over ranks with different numbers of samples equal those of one rank."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from integration.forks import forked_ranks, wait_for_exit

from hwopt.tasks.regression_metrics import RegressionMetrics

SHARES = (slice(0, 5), slice(5, 12))


def values() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(12, 2, generator=generator), torch.randn(12, 2, generator=generator)


def measured(part: slice) -> RegressionMetrics:
    found, actual = (each[part] for each in values())
    metrics = RegressionMetrics("cpu", ["a", "b"])
    metrics.update(SimpleNamespace(logits=found), actual, (found - actual).square().sum(), actual.numel())
    return metrics


def test_ranks_with_different_numbers_of_samples_have_the_metrics_of_one(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        dist.init_process_group("gloo")
        metrics = measured(SHARES[rank])
        (tmp_path / f"{rank}.json").write_text(json.dumps([metrics.compute(), metrics.details()]))

    output = tmp_path / "output"
    assert [wait_for_exit(pid) for pid in forked_ranks(work, 2, tmp_path, output)] == [0, 0], output.read_text()
    alone = measured(slice(0, 12))
    for rank in (0, 1):
        found, details = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found == pytest.approx(alone.compute())
        assert details == alone.details()
