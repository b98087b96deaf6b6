from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, f1_score

from hwopt.tasks.metrics import ClassMetrics, TokenMetrics


@given(
    labels=st.integers(2, 6),
    seed=st.integers(0, 2**31),
    samples=st.integers(1, 60),
    batch=st.integers(1, 20),
)
@settings(deadline=None)
def test_class_metrics_equal_those_of_scikit_learn(labels: int, seed: int, samples: int, batch: int) -> None:
    random = np.random.default_rng(seed)
    logits = torch.from_numpy(random.normal(size=(samples, labels))).float()
    targets = torch.from_numpy(random.integers(0, random.integers(1, labels + 1), samples))  # some classes may be absent
    metrics = ClassMetrics(labels, "cpu")
    losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    for at in range(0, samples, batch):
        part = slice(at, at + batch)
        metrics.update(SimpleNamespace(logits=logits[part]), targets[part], losses[part].sum(), len(targets[part]))
    found = metrics.compute()
    predicted = logits.argmax(-1)
    assert found["f1"] == pytest.approx(f1_score(targets, predicted, average="macro", zero_division=0))
    assert found["accuracy"] == pytest.approx(accuracy_score(targets, predicted))
    assert found["loss"] == pytest.approx(losses.double().mean().item(), rel=1e-5)
    if labels == 2:
        assert found["f1_binary"] == pytest.approx(f1_score(targets, predicted, zero_division=0))
    else:
        assert set(found) == {"loss", "accuracy", "f1"}
    assert all(isinstance(value, float) for value in found.values())


def test_token_metrics_weigh_by_tokens() -> None:
    metrics = TokenMetrics("cpu")
    metrics.update(None, torch.empty(0), torch.tensor(6.0), torch.tensor(2))
    metrics.update(None, torch.empty(0), torch.tensor(3.0), 1)
    assert metrics.compute() == {"loss": 3.0, "perplexity": pytest.approx(math.exp(3))}
    metrics.update(None, torch.empty(0), torch.tensor(1e9), 1)
    assert metrics.compute()["perplexity"] == math.inf


def test_metrics_of_no_samples_are_nan() -> None:
    assert all(math.isnan(value) for value in TokenMetrics("cpu").compute().values())
    assert math.isnan(ClassMetrics(3, "cpu").compute()["f1"])


class FailsOnce(ClassMetrics):
    """Runs out of memory at the first micro-batch, after part of it was counted."""

    failed = False

    def _count(self, outputs: object, targets: torch.Tensor, extra: torch.Tensor) -> None:
        super()._count(outputs, targets, extra)
        if not self.failed:
            self.failed = True
            raise torch.OutOfMemoryError


def test_micro_batch_that_ran_out_of_memory_is_counted_once() -> None:
    metrics, outputs, targets = FailsOnce(2, "cpu"), SimpleNamespace(logits=torch.eye(2)), torch.tensor([0, 0])
    with pytest.raises(torch.OutOfMemoryError):
        metrics.update(outputs, targets, torch.tensor(3.0), 2)
    metrics.update(outputs, targets, torch.tensor(3.0), 2)
    assert metrics.compute() == {"loss": 1.5, "accuracy": 0.5, "f1": pytest.approx(1 / 3), "f1_binary": 0.0}
