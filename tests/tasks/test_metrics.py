"""Metrics of each task: batches, tokens without a label, values that are not defined."""

import json
import math
import random
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hwopt.tasks.entity_metrics import EntityMetrics, tags_for_seqeval
from hwopt.tasks.metrics import ClassMetrics, LabelSetMetrics, RegressionMetrics, TokenMetrics
from hwopt.tasks.prepared import IGNORED


def outputs(logits: torch.Tensor) -> Any:
    return SimpleNamespace(logits=logits)


@pytest.mark.parametrize("labels", [2, 4])
def test_batches_of_any_size_have_the_metrics_of_all_samples(labels: int) -> None:
    """The last batch is smaller. One class never occurs, and one is never predicted."""
    generator = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(23, labels, generator=generator), torch.randint(0, labels, (23,), generator=generator)
    logits[:, -1] = -9
    whole, parts = (ClassMetrics("abcd"[:labels], "cpu") for _ in range(2))
    whole.update(outputs(logits), targets, torch.tensor(23.0), 23)
    for at in range(0, 23, 5):
        part = slice(at, at + 5)
        rows = len(targets[part])
        parts.update(outputs(logits[part]), targets[part], torch.tensor(float(rows)), rows)
    assert parts.compute() == whole.compute()
    assert parts.details() == whole.details()
    assert set(parts.compute()) == {"loss", "accuracy", "f1"} | ({"f1_binary"} if labels == 2 else set())
    assert parts.compute()["accuracy"] == (logits.argmax(-1) == targets).double().mean().item()
    assert all(type(value) is float for value in parts.compute().values())
    json.dumps(parts.details())


def test_details_name_each_class_and_count_each_confusion() -> None:
    metrics = ClassMetrics(["cat", "dog", "owl"], "cpu")
    predictions, targets = torch.tensor([0, 1, 1, 0]), torch.tensor([0, 0, 1, 1])
    metrics.update(outputs(torch.eye(3)[predictions]), targets, torch.tensor(1.0), 4)
    assert metrics.details() == {
        "classes": [
            {"label": "cat", "precision": 0.5, "recall": 0.5, "f1": 0.5, "support": 2},
            {"label": "dog", "precision": 0.5, "recall": 0.5, "f1": 0.5, "support": 2},
            {"label": "owl", "precision": 0.0, "recall": 0.0, "f1": 0.0, "support": 0},
        ],
        "confusion_matrix": {"labels": ["cat", "dog", "owl"], "rows": [[1, 1, 0], [1, 1, 0], [0, 0, 0]]},
    }


def test_an_update_does_not_read_from_the_device() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    names: list[str] = []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            names.append(function._schema.name.removeprefix("aten::"))
            return function(*args, **(kwargs or {}))

    metrics = ClassMetrics("abcd", "cpu")
    given, targets, loss = outputs(torch.eye(4)), torch.arange(4), torch.tensor(2.0)
    with Calls():
        metrics.update(given, targets, loss, 4)
    assert not {"_local_scalar_dense", "nonzero", "item", "bincount"} & set(names)


def test_token_metrics_weigh_by_tokens() -> None:
    metrics = TokenMetrics("cpu")
    metrics.update(None, torch.empty(0), torch.tensor(6.0), torch.tensor(2))
    metrics.update(None, torch.empty(0), torch.tensor(3.0), 1)
    assert metrics.compute() == {"loss": 3.0, "perplexity": pytest.approx(math.exp(3))}
    metrics.update(None, torch.empty(0), torch.tensor(1e9), 1)
    assert metrics.compute()["perplexity"] == math.inf


@pytest.mark.parametrize("metrics", [TokenMetrics, *(partial(kind, "ab") for kind in (ClassMetrics, LabelSetMetrics))])
def test_metrics_of_no_samples_are_nan(metrics: Any) -> None:
    assert all(map(math.isnan, metrics(device="cpu").compute().values()))
    metrics = EntityMetrics(["O", "B-PER"], "cpu")
    assert all(map(math.isnan, metrics.compute().values()))
    assert metrics.details() == {"classes": [{"label": "PER", "precision": 0.0, "recall": 0.0, "f1": 0.0, "support": 0}]}


@pytest.mark.parametrize("targets", [1, 3])
def test_regression_metrics_of_batches_are_those_of_each_target(targets: int) -> None:
    torch.manual_seed(0)
    actual = torch.randn(50, targets)
    found = actual * torch.tensor([2.0, -1.0, 1.0])[:targets]
    metrics = RegressionMetrics("cpu", [f"t{number}" for number in range(targets)])
    for begin, end in ((0, 7), (7, 8), (8, 50)):
        metrics.update(outputs(found[begin:end]), actual[begin:end], torch.tensor(3.0), end - begin)
    values = metrics.compute()
    assert values["loss"] == pytest.approx(9 / 50)
    assert values["mse"] == pytest.approx((found - actual).square().mean().item())
    assert values["mae"] == pytest.approx((found - actual).abs().mean().item())
    assert values["pearson"] == pytest.approx(1 if targets == 1 else 1 / 3)
    rows = metrics.details().get("targets", [])
    assert [(row["target"], round(row["spearman"])) for row in rows] == (
        [] if targets == 1 else [("t0", 1), ("t1", -1), ("t2", 1)]
    )


@pytest.mark.parametrize(
    ("found", "actual", "undefined"),
    [
        ([], [], {"mse", "mae", "r2", "pearson", "spearman"}),
        ([1.0, 1.0, 1.0], [0.0, 1.0, 2.0], {"pearson", "spearman"}),
        ([0.0, 1.0, 2.0], [1.0, 1.0, 1.0], {"r2", "pearson", "spearman"}),
        ([1.0], [2.0], {"r2", "pearson", "spearman"}),
        ([1.0, math.nan], [2.0, 3.0], {"mse", "mae", "r2", "pearson", "spearman"}),
    ],
)
def test_undefined_regression_metrics_are_not_numbers(found: list[float], actual: list[float], undefined: set[str]) -> None:
    metrics = RegressionMetrics("cpu", ["a"])
    metrics.update(outputs(torch.tensor(found).view(-1, 1)), torch.tensor(actual).view(-1, 1), torch.tensor(1.0), len(found))
    assert {name for name, value in metrics.compute().items() if math.isnan(value)} - {"loss"} == undefined


@pytest.mark.parametrize("labels", [1, 5])
def test_label_set_metrics_of_batches_are_counted_for_each_label(labels: int) -> None:
    torch.manual_seed(0)
    actual = (torch.rand(40, labels) < torch.tensor([0.5, 0.3, 0.1, 0.0, 0.9])[:labels]).float()
    logits = torch.randn(40, labels) + actual - 0.5
    logits[:, 3:4] = -1  # a label that neither occurs nor is predicted
    metrics = LabelSetMetrics(list("abcde")[:labels], "cpu")
    for begin, end in ((0, 13), (13, 40)):
        metrics.update(outputs(logits[begin:end]), actual[begin:end], torch.tensor(float(end - begin)), (end - begin) * labels)
    values, found, rows = metrics.compute(), logits >= 0, metrics.details()["classes"]
    assert values["exact_match"] == pytest.approx((found == (actual > 0)).all(1).double().mean().item())
    assert values["loss"] == pytest.approx(1 / labels)
    hits, own = (found * actual).sum(0), actual.sum(0)
    each = 2 * hits / (found.sum(0) + own).clamp(min=1)
    assert [row["f1"] for row in rows] == pytest.approx(each.tolist())
    assert [row["support"] for row in rows] == own.tolist()
    assert [row["recall"] for row in rows] == pytest.approx((hits / own.clamp(min=1)).tolist())
    assert values["f1_macro"] == pytest.approx(each.mean().item())
    assert values["f1_micro"] == pytest.approx((2 * hits.sum() / (found.sum() + own.sum())).item())


def entities(tags: Sequence[str], actual: Sequence[Sequence[str]], found: Sequence[Sequence[str]], gap: int = 0) -> EntityMetrics:
    """The metrics of sentences; after each word come up to `gap` tokens without a label, with predictions that do not count."""
    draw = random.Random(1)
    metrics = EntityMetrics(tags, "cpu")
    number = {tag: index for index, tag in enumerate(tags)}
    rows: list[tuple[list[int], list[int]]] = []
    for own, guesses in zip(actual, found, strict=True):
        row: tuple[list[int], list[int]] = ([IGNORED], [draw.randrange(len(tags))])
        for tag, guess in zip(own, guesses, strict=True):
            noise = draw.randint(0, gap)
            row[0].extend([number[tag], *[IGNORED] * noise])
            row[1].extend([number[guess], *(draw.randrange(len(tags)) for _ in range(noise))])
        rows.append(row)
    width = max(len(row[0]) for row in rows) + 1
    targets = torch.tensor([row[0] + [IGNORED] * (width - len(row[0])) for row in rows])
    guesses = torch.tensor([row[1] + [0] * (width - len(row[1])) for row in rows])
    logits = torch.nn.functional.one_hot(guesses, len(tags)).float()
    for begin in range(0, len(rows), 7):
        part = slice(begin, begin + 7)
        metrics.update(outputs(logits[part]), targets[part], torch.tensor(1.0), 1)
    return metrics


@pytest.mark.parametrize(
    ("actual", "found", "precision", "recall"),
    [
        ("B-PER I-PER O B-LOC", "B-PER I-PER O B-LOC", 1, 1),
        ("B-PER I-PER O B-LOC", "B-PER O O B-LOC", 1 / 2, 1 / 2),  # a part of an entity is wrong
        ("B-PER I-PER O O", "B-PER I-LOC O O", 0, 0),  # two entities instead of one
        ("I-PER I-PER O O", "B-PER I-PER O O", 1, 1),  # IOB1: I begins an entity after O
        ("B-PER B-PER O O", "B-PER I-PER O O", 0, 0),
        ("O O O B-PER", "O O B-PER B-PER", 1 / 2, 1),
        ("O O O O", "O O O O", 0, 0),
        ("S-PER B-LOC E-LOC O", "S-PER B-LOC E-LOC O", 1, 1),
    ],
)
def test_entities_are_counted_as_by_hand(actual: str, found: str, precision: float, recall: float) -> None:
    tags = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC", "S-PER", "E-LOC"]
    values = entities(tags, [actual.split()], [found.split()]).compute()
    assert (values["precision"], values["recall"]) == (precision, recall)
    assert values["f1"] == pytest.approx(2 * precision * recall / (precision + recall) if precision + recall else 0)
    assert values["accuracy"] == np.mean([a == b for a, b in zip(actual.split(), found.split(), strict=True)])


@pytest.mark.parametrize(
    ("actual", "found", "rows"),
    [
        ("O NOUN NOUN VERB", "O NOUN VERB VERB", [("ADJ", 0, 0), ("NOUN", 0, 1), ("VERB", 0, 1)]),  # tags without a prefix
        ("O NOUN ADJ VERB", "O NOUN O VERB", [("ADJ", 0, 1), ("NOUN", 1, 1), ("VERB", 1, 1)]),
        ("O O", "O O", [("ADJ", 0, 0), ("NOUN", 0, 0), ("VERB", 0, 0)]),
    ],
)
@pytest.mark.parametrize("gap", [0, 2])
def test_each_type_has_its_row_and_words_without_a_label_do_not_count(
    actual: str, found: str, rows: list[tuple[str, float, int]], gap: int
) -> None:
    metrics = entities(["O", "NOUN", "VERB", "ADJ"], [actual.split()] * 9, [found.split()] * 9, gap)
    shown = [(row["label"], row["f1"], row["support"] / 9) for row in metrics.details()["classes"]]
    assert shown == rows


def test_tags_keep_their_type() -> None:
    tags = {"B-PER": "B-PER", "I-A-B": "I-A-B", "B": "B-_", "ORG": "I-ORG", "NOUN": "I-NOUN", "O": "O", ".": "O", "X-Y": "I-X-Y"}
    assert dict(zip(tags, tags_for_seqeval([*tags]), strict=True)) == tags


def test_letters_of_bilou_and_bmewo_are_those_of_one_entity() -> None:
    """A perfect prediction of two entities, and one that misses the end of the first."""
    names = ["O", "B-PER", "I-PER", "L-PER", "U-PER", "B-LOC", "M-LOC", "E-LOC", "W-LOC", "U-X"]
    assert tags_for_seqeval(names)[3:] == ["E-PER", "S-PER", "B-LOC", "I-LOC", "E-LOC", "S-LOC", "I-U-X"]
    targets = torch.tensor([[1, 2, 3, 4, 0]])
    for predicted, f1 in ((targets, 1.0), (torch.tensor([[1, 2, 0, 4, 0]]), 0.5)):
        metrics = EntityMetrics(names, "cpu")
        logits = torch.nn.functional.one_hot(predicted, len(names)).float()
        metrics.update(outputs(logits), targets, torch.tensor(5.0), 5)
        assert metrics.compute()["f1"] == pytest.approx(f1)
