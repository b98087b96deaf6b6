"""Evaluate a trained model on the rows of a file: the task's metrics, each row counted once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from hwopt.data.batches.collate import StepDataset, cut_in_order
from hwopt.data.batches.step_batch import Step, Widths
from hwopt.data.sources.reading import read_all, read_options
from hwopt.inference.batches import Batches
from hwopt.inference.options import InferenceOptions
from hwopt.inference.trained_model import TrainedModel, find_run_model, load_trained_model
from hwopt.tasks.metrics import GeneratedMetrics
from hwopt.tasks.prepared import Prepared


@dataclass(frozen=True)
class EvaluationReport:
    """The results of an evaluation."""

    run: Path
    source: str
    samples: int
    metrics: dict[str, float]
    details: dict[str, Any] = field(default_factory=dict)
    skipped: int = 0
    """Rows that could not be used."""
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON types."""
        counts = {"run": str(self.run), "data": self.source, "samples": self.samples, "skipped_rows": self.skipped}
        finite = {name: value if math.isfinite(value) else None for name, value in self.metrics.items()}  # JSON has no NaN
        return counts | finite | self.details | {"notes": list(self.notes)}


def evaluate(run: Path, source: str, cache: Path, options: InferenceOptions) -> EvaluationReport:
    """The metrics of the model of `run` on the rows of `source`.

    Raises InputError for a run without a model, DataError for data that cannot be used, DoesNotFitError if single rows do not
    fit into the device's memory.
    """
    found = find_run_model(run, options.assignments)
    data = found.job.data
    rows = read_all(source, None, replace(read_options(data), max_rows=None, streaming=False))
    loaded = load_trained_model(found, cache)
    task = loaded.task
    store = task.evaluation_store(loaded.trained, rows, cache)
    prepared = Prepared(store, None, loaded.trained.tokenizer, loaded.trained.label_names or None)
    prepared.report_bad_rows(rows)
    metrics = task.metrics(prepared, loaded.device)
    collate = task.collate()(
        cut_in_order,
        max_rows=len(store),
        pad_id=getattr(loaded.trained.tokenizer, "pad_token_id", None) or 0,
        widths=Widths((), loaded.settings.pad_to_multiple_of),
    )
    dataset = StepDataset(store, collate)
    order = np.argsort(-store.lengths, kind="stable").tolist()
    batches = Batches(loaded.device, options.batch_size or loaded.settings.batch, options.warn)
    lengths = store.lengths

    def work(part: Sequence[int]) -> Sequence[int]:
        return add_rows(loaded, dataset, part, metrics)

    for _ in batches.run(order, lambda index: int(lengths[index]), work):
        pass
    skipped = len(rows.bad_rows.reasons)
    return EvaluationReport(
        found.folder, source, len(store), metrics.compute(), metrics.details(), skipped, (*loaded.notes, *prepared.warnings)
    )


def add_rows(loaded: TrainedModel, dataset: StepDataset, samples: Sequence[int], metrics: Any) -> Sequence[int]:
    """Add `samples` to `metrics`, and return them."""
    batch = dataset[Step(0, 0, tuple(samples), int(dataset.store.counts[list(samples)].sum()))].to(loaded.device)
    with loaded.inference():
        for micro_batch, _ in batch.micro_batches():
            if isinstance(metrics, GeneratedMetrics):
                metrics.generate(loaded.model, micro_batch.inputs, micro_batch.targets)
            outputs = loaded.model(**micro_batch.inputs)
            loss, count = loaded.task.loss(outputs, micro_batch.targets)
            metrics.update(outputs, micro_batch.targets, loss, count)
    return samples
