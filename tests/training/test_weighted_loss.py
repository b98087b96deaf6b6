"""Class weights and label smoothing: the loss of torch over the whole step batch, however the step batch is split."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight
from training.float64 import tiny_run

from hwopt.config.job import make_job
from hwopt.errors import InputError, PluginError
from hwopt.tasks.labels import label_weights
from hwopt.testing import plan_for, tiny_job, tiny_profile, train_tiny
from hwopt.training.run import Run

WEIGHTED = "task.class_weights={colour = 3.5, other = 0.2}"
ROWS = {"train": 4, "effective": 8}


def first_step(run: Run) -> tuple[Any, torch.Tensor, float]:
    """(the first step batch, its gradient, its mean loss), with the model in evaluation mode."""
    run.inner_model.eval()
    batch, mean = next(iter(run.train_loader)), 0.0
    for micro_batch, last in batch.micro_batches():
        loss, count = run.loss(run.inner_model(**micro_batch.inputs), micro_batch.targets)
        assert float(count) == pytest.approx(micro_batch.count)
        run.engine.backward(loss, micro_batch.loss_weight, last)
        mean += loss.item() * micro_batch.loss_weight
    gradients = [p.grad.flatten() for p in run.inner_model.parameters() if p.grad is not None]
    run.engine.zero_grad()
    return batch, torch.cat(gradients), mean


@pytest.mark.parametrize(
    ("kind", "assignments"),
    [
        ("text-classification", [WEIGHTED]),
        ("text-classification", ["task.class_weights=balanced", "task.label_smoothing=0.1"]),
        ("text-classification", ["task.label_smoothing=0.3"]),
        ("causal-lm", ["task.label_smoothing=0.1"]),
        ("causal-lm", []),
    ],
)
def test_a_step_has_the_mean_loss_of_torch_with_any_split(kind: str, assignments: list[str], tmp_path: Path) -> None:
    found = []
    for rows in (8, 3, 1):
        with tiny_run(tmp_path, kind, *assignments, batch={"train": rows, "effective": 8}) as run:
            batch, gradient, mean = first_step(run)
            found.append((gradient, mean))
            if rows == 8:
                ((micro_batch, _),) = batch.micro_batches()
                logits = run.inner_model(**micro_batch.inputs).logits.float()
                weights = run.prepared.class_weights
                expected = torch.nn.functional.cross_entropy(
                    logits.flatten(0, -2),
                    micro_batch.targets.flatten(),
                    weight=None if weights is None else torch.tensor(weights),
                    label_smoothing=run.plan.job.task.label_smoothing,
                )
    assert found[0][1] == pytest.approx(expected.item(), rel=1e-5)
    for gradient, mean in found[1:]:
        assert (gradient - found[0][0]).norm() <= 1e-6 * found[0][0].norm()  # the loss is computed in float32
        assert mean == pytest.approx(found[0][1], rel=1e-6)


def test_weights_and_smoothing_change_the_training_loss_and_not_the_evaluation(tmp_path: Path) -> None:
    plain, weighted = [], []
    for found, assignments in ((plain, []), (weighted, [WEIGHTED, "task.label_smoothing=0.2"])):
        folder = tmp_path / str(len(assignments))
        base = tiny_job(folder / "data", max_steps=1, learning_rate=1e-12)
        found += train_tiny(plan_for(tiny_profile(), make_job(base.document, assignments)), folder).rows
    assert plain[0]["loss"] != pytest.approx(weighted[0]["loss"], rel=1e-3)
    assert plain[1]["eval_loss"] == pytest.approx(weighted[1]["eval_loss"], rel=1e-6)


@pytest.mark.parametrize("table", ["pack", "length_batching"])
def test_weights_are_exact_with_other_splits_and_packing(table: str, tmp_path: Path) -> None:
    found = []
    for tables in ({}, {table: {}}):
        with tiny_run(tmp_path / str(len(tables)), "text-classification", WEIGHTED, batch=ROWS, **tables) as run:
            found.append(first_step(run)[1])
    assert (found[0] - found[1]).norm() <= 1e-5 * found[0].norm()


def test_weights_reach_the_workers(tmp_path: Path) -> None:
    found = []
    for workers in (0, 1):
        tables = {"batch": ROWS, "dataloader": {"num_workers": workers}}
        with tiny_run(tmp_path / str(workers), "text-classification", WEIGHTED, **tables) as run:
            found.append(next(iter(run.train_loader)).units)
    assert found[0] == found[1]
    assert set(found[0]) <= {3.5, 0.2}


def test_balanced_weights_are_those_of_scikit_learn() -> None:
    labels = np.array([0, 0, 0, 2, 2, 1])
    expected = compute_class_weight("balanced", classes=np.arange(3), y=labels)
    assert label_weights("balanced", ("a", "b", "c"), labels) == pytest.approx(expected)


def test_a_label_without_a_weight_has_weight_1() -> None:
    assert label_weights({"b": 2.0}, ("a", "b"), np.array([0, 1])) == (1.0, 2.0)
    with pytest.raises(InputError, match=r"task\.class_weights: the training data has no label 'bb'\. Did you mean 'b'\?"):
        label_weights({"bb": 2.0}, ("a", "b"), np.array([0, 1]))


@pytest.mark.parametrize(
    ("kind", "assignment", "message"),
    [
        ("text-classification", "task.class_weights=balance", "or a table { LABEL = WEIGHT }, got 'balance'"),
        ("text-classification", "task.class_weights={colour = 0}", "the weight of 'colour' is 0; expected a number above 0"),
        ("text-classification", "task.label_smoothing=1.0", "task.label_smoothing"),
        ("causal-lm", "task.class_weights=balanced", "task.class_weights belongs to task.kind = 'image-classification'"),
    ],
)
def test_bad_values_are_refused(kind: str, assignment: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        make_job(tiny_job(tmp_path, kind).document, [assignment])


def test_a_plugin_that_computes_the_loss_is_refused_with_label_smoothing(tmp_path: Path) -> None:
    job = make_job(tiny_job(tmp_path, "causal-lm").document, ["task.label_smoothing=0.1"])
    with pytest.raises(PluginError, match=r"task\.label_smoothing: plugin 'fused_loss' .* computes the loss itself"):
        plan_for(replace(tiny_profile(fused_loss={}), chosen=frozenset({"fused_loss"})), job)
