"""Metrics over ranks with different numbers of samples equal those of one rank."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from integration.forks import on_ranks

from hwopt.tasks.entity_metrics import EntityMetrics
from hwopt.tasks.metrics import ClassMetrics, LossMetrics, RegressionMetrics
from hwopt.tasks.prepared import IGNORED

SHARES = (slice(0, 5), slice(5, 12))


def measured(part: slice) -> dict[str, LossMetrics]:
    """The metrics of each kind, of the samples `part`. The second rank has wider rows of words."""
    draw = torch.Generator().manual_seed(0)
    scores, values = torch.randn(12, 2, generator=draw), torch.randn(12, 2, generator=draw)
    words, tags = torch.randn(12, 6, 3, generator=draw), torch.randint(0, 3, (12, 6), generator=draw)
    tags[:5, 4:] = IGNORED
    width = 4 if part == SHARES[0] else 6
    batches = {
        "classes": (ClassMetrics("ab", "cpu"), scores, values.argmax(-1)),
        "regression": (RegressionMetrics("cpu", ["a", "b"]), scores, values),
        "entities": (EntityMetrics(["O", "B-PER", "I-PER"], "cpu"), words[:, :width], tags[:, :width]),
    }
    for metrics, logits, targets in batches.values():
        rows = len(targets[part])
        metrics.update(SimpleNamespace(logits=logits[part]), targets[part], torch.tensor(float(rows)), rows)
    return {name: metrics for name, (metrics, *_) in batches.items()}


def test_ranks_with_different_numbers_of_samples_have_the_metrics_of_one(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        dist.init_process_group("gloo")
        found = {name: [each.compute(), each.details()] for name, each in measured(SHARES[rank]).items()}
        (tmp_path / f"{rank}.json").write_text(json.dumps(found))

    on_ranks(work, tmp_path)
    alone = measured(slice(0, 12))
    for rank in (0, 1):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        for name, metrics in alone.items():
            assert found[name][0] == pytest.approx(metrics.compute()), name
            assert found[name][1] == metrics.details(), name
