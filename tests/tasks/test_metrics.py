from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, confusion_matrix, f1_score, precision_recall_fscore_support

from hwopt.tasks.metrics import MAX_MATRIX_LABELS, ClassMetrics, TokenMetrics


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
    details = metrics.details()
    scores = precision_recall_fscore_support(targets, predicted, labels=range(labels), zero_division=0)
    for number, each in enumerate(details["classes"]):
        assert each["label"] == str(number)
        assert [each[key] for key in ("precision", "recall", "f1", "support")] == pytest.approx([s[number] for s in scores])
    assert details["confusion_matrix"]["rows"] == confusion_matrix(targets, predicted, labels=range(labels)).tolist()


def test_details_name_each_class_and_count_each_confusion() -> None:
    metrics = ClassMetrics(3, "cpu", ["cat", "dog", "owl"])
    predictions, targets = torch.tensor([0, 1, 1, 0]), torch.tensor([0, 0, 1, 1])
    metrics.update(SimpleNamespace(logits=torch.eye(3)[predictions]), targets, torch.tensor(1.0), 4)
    assert metrics.details() == {
        "classes": [
            {"label": "cat", "precision": 0.5, "recall": 0.5, "f1": 0.5, "support": 2},
            {"label": "dog", "precision": 0.5, "recall": 0.5, "f1": 0.5, "support": 2},
            {"label": "owl", "precision": 0.0, "recall": 0.0, "f1": 0.0, "support": 0},
        ],
        "confusion_matrix": {"labels": ["cat", "dog", "owl"], "rows": [[1, 1, 0], [1, 1, 0], [0, 0, 0]]},
    }


def test_many_labels_have_class_metrics_without_a_matrix() -> None:
    labels = MAX_MATRIX_LABELS + 1
    metrics = ClassMetrics(labels, "cpu")
    targets = torch.arange(labels)
    metrics.update(SimpleNamespace(logits=torch.eye(labels)), targets, torch.tensor(1.0), labels)
    details = metrics.details()
    assert set(details) == {"classes"}
    assert all(each["f1"] == 1.0 and each["support"] == 1 for each in details["classes"])


def test_an_update_does_not_read_from_the_device() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    names: list[str] = []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            names.append(function._schema.name.removeprefix("aten::"))
            return function(*args, **(kwargs or {}))

    metrics = ClassMetrics(4, "cpu")
    outputs, targets, loss = SimpleNamespace(logits=torch.eye(4)), torch.arange(4), torch.tensor(2.0)
    with Calls():
        metrics.update(outputs, targets, loss, 4)
    assert names.count("index_add_") == 4
    assert not {"_local_scalar_dense", "nonzero", "item", "bincount"} & set(names)


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
