from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch

from hwopt.tasks.metrics import MAX_MATRIX_LABELS, ClassMetrics, TokenMetrics


@pytest.mark.parametrize("labels", [2, 4])
def test_batches_of_any_size_have_the_metrics_of_all_samples(labels: int) -> None:
    """The last batch is smaller. One class never occurs, and one is never predicted."""
    generator = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(23, labels, generator=generator), torch.randint(0, labels, (23,), generator=generator)
    logits[:, -1] = -9
    whole, parts = ClassMetrics(labels, "cpu"), ClassMetrics(labels, "cpu")
    whole.update(SimpleNamespace(logits=logits), targets, torch.tensor(23.0), 23)
    for at in range(0, 23, 5):
        part = slice(at, at + 5)
        rows = len(targets[part])
        parts.update(SimpleNamespace(logits=logits[part]), targets[part], torch.tensor(float(rows)), rows)
    assert parts.compute() == whole.compute()
    assert parts.details() == whole.details()
    assert set(parts.compute()) == {"loss", "accuracy", "f1"} | ({"f1_binary"} if labels == 2 else set())
    assert parts.compute()["accuracy"] == (logits.argmax(-1) == targets).double().mean().item()
    assert all(type(value) is float for value in parts.compute().values())
    json.dumps(parts.details())


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
    """Runs out of memory at the first micro-batch, while its predictions are read."""

    failed = False

    def _pair(self, outputs: object, targets: torch.Tensor) -> torch.Tensor:
        if not self.failed:
            self.failed = True
            raise torch.OutOfMemoryError
        return super()._pair(outputs, targets)


def test_micro_batch_that_ran_out_of_memory_is_counted_once() -> None:
    metrics, outputs, targets = FailsOnce(2, "cpu"), SimpleNamespace(logits=torch.eye(2)), torch.tensor([0, 0])
    with pytest.raises(torch.OutOfMemoryError):
        metrics.update(outputs, targets, torch.tensor(3.0), 2)
    metrics.update(outputs, targets, torch.tensor(3.0), 2)
    assert metrics.compute() == {"loss": 1.5, "accuracy": 0.5, "f1": pytest.approx(1 / 3), "f1_binary": 0.0}
