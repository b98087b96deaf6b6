"""Metrics of regression, multi-label and token classification, against scikit-learn, scipy, seqeval and counting by hand."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.stats
import seqeval.metrics
import sklearn.metrics
import torch

from hwopt.tasks.entity_metrics import EntityMetrics
from hwopt.tasks.metrics import LabelSetMetrics
from hwopt.tasks.prepared import IGNORED
from hwopt.tasks.regression_metrics import RegressionMetrics, correlation, ranks


def outputs(logits: torch.Tensor) -> Any:
    return SimpleNamespace(logits=logits)


@pytest.mark.parametrize("targets", [1, 3])
def test_regression_metrics_are_those_of_scikit_learn_and_scipy(targets: int) -> None:
    torch.manual_seed(0)
    actual = torch.randn(50, targets).mul(4).round() / 4  # with ties
    found = (actual + torch.randn(50, targets)).mul(4).round() / 4
    metrics = RegressionMetrics("cpu", [f"t{number}" for number in range(targets)])
    for begin, end in ((0, 7), (7, 8), (8, 50)):
        metrics.update(outputs(found[begin:end]), actual[begin:end], torch.tensor(3.0), end - begin)
    values = metrics.compute()
    assert values["loss"] == pytest.approx(9 / 50)
    assert values["mse"] == pytest.approx(sklearn.metrics.mean_squared_error(actual, found))
    assert values["mae"] == pytest.approx(sklearn.metrics.mean_absolute_error(actual, found))
    assert values["r2"] == pytest.approx(sklearn.metrics.r2_score(actual, found))
    for name, function in (("pearson", scipy.stats.pearsonr), ("spearman", scipy.stats.spearmanr)):
        each = [function(actual[:, target], found[:, target]).statistic for target in range(targets)]
        assert values[name] == pytest.approx(np.mean(each), rel=1e-6)
    details = metrics.details()
    assert [each["target"] for each in details.get("targets", [])] == ([] if targets == 1 else ["t0", "t1", "t2"])


def test_correlation_with_a_constant_is_not_a_number() -> None:
    assert math.isnan(correlation(np.ones(3), np.arange(3.0)))
    assert ranks(np.array([5.0, 1.0, 5.0, 2.0])).tolist() == [3.5, 1.0, 3.5, 2.0]
    empty = RegressionMetrics("cpu", ["a"])
    assert all(math.isnan(value) for value in empty.compute().values())


def test_label_set_metrics_are_those_of_scikit_learn() -> None:
    torch.manual_seed(0)
    actual = (torch.rand(40, 5) < torch.tensor([0.5, 0.3, 0.1, 0.0, 0.9])).float()
    logits = torch.randn(40, 5) + actual - 0.5
    logits[:, 3] = -1  # a label that neither occurs nor is predicted
    metrics = LabelSetMetrics(list("abcde"), "cpu")
    for begin, end in ((0, 13), (13, 40)):
        metrics.update(outputs(logits[begin:end]), actual[begin:end], torch.tensor(float(end - begin)), (end - begin) * 5)
    values, found = metrics.compute(), (logits >= 0).int()
    for average in ("micro", "macro"):
        expected = sklearn.metrics.f1_score(actual, found, average=average, zero_division=0)
        assert values[f"f1_{average}"] == pytest.approx(expected)
    assert values["exact_match"] == pytest.approx(sklearn.metrics.accuracy_score(actual, found))
    assert values["loss"] == pytest.approx(0.2)
    report = sklearn.metrics.classification_report(actual, found, target_names=list("abcde"), output_dict=True, zero_division=0)
    for each in metrics.details()["classes"]:
        for name, theirs in (("precision", "precision"), ("recall", "recall"), ("f1", "f1-score"), ("support", "support")):
            assert each[name] == pytest.approx(report[each["label"]][theirs])


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


SCHEMES = {
    "iob": ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"],
    "bioes": ["O", "B-PER", "I-PER", "E-PER", "S-PER", "B-LOC", "I-LOC", "E-LOC", "S-LOC"],
    "io": ["O", "I-PER", "I-LOC", "I-MISC"],
    "bare": ["O", "B", "I"],
    "plain": ["O", "NOUN", "VERB", "ADJ"],
}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("gap", [0, 2])
def test_entities_are_those_of_seqeval(scheme: str, gap: int) -> None:
    tags = SCHEMES[scheme]
    draw = random.Random(scheme)
    actual = [draw.choices(tags, k=draw.randint(1, 9)) for _ in range(60)]
    found = [[tag if draw.random() < 0.7 else draw.choice(tags) for tag in row] for row in actual]
    metrics = entities(tags, actual, found, gap)
    values = metrics.compute()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tags without a prefix
        for name in ("precision", "recall", "f1"):
            assert values[name] == pytest.approx(getattr(seqeval.metrics, f"{name}_score")(actual, found)), name
        assert values["accuracy"] == pytest.approx(seqeval.metrics.accuracy_score(actual, found))
        report = seqeval.metrics.classification_report(actual, found, output_dict=True, zero_division=0)
    for each in metrics.details()["classes"]:
        if each["label"] in report:
            theirs = report[each["label"]]
            assert [each["precision"], each["recall"], each["f1"]] == pytest.approx(
                [theirs["precision"], theirs["recall"], theirs["f1-score"]]
            )
            assert each["support"] == theirs["support"]
