"""Evaluate a trained model on the rows of a file: the task's metrics, each row counted once."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hwopt.data.batches.collate import StepDataset, cut_in_order
from hwopt.data.batches.samplers import EvalSampler
from hwopt.data.batches.step_batch import Widths
from hwopt.data.sources.reading import read_options
from hwopt.inference.settings import InferenceOptions
from hwopt.inference.trained_model import find_run_model, load_trained_model
from hwopt.tasks.prepared import Prepared
from hwopt.text import counted
from hwopt.training.evaluation import Forward, add_batch


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
    rows = found.rows(source, replace(read_options(data), max_rows=None, streaming=False))
    loaded = load_trained_model(found, cache)
    task = loaded.task
    store = task.evaluation_store(loaded.trained, rows, cache)
    prepared = Prepared(store, None, loaded.trained.tokenizer, loaded.trained.label_names)
    prepared.report_bad_rows(rows)
    metrics = task.metrics(prepared, loaded.device)
    batch_sizes = options.batch(loaded.settings)
    collate = task.collate()(
        cut_in_order,
        max_rows=batch_sizes.eval_rows(),
        pad_id=getattr(loaded.trained.tokenizer, "pad_token_id", None) or 0,
        widths=Widths((), batch_sizes.pad_to_multiple_of),
    )
    dataset = StepDataset(store, collate)
    forward, backoff = Forward(loaded.model, task.loss, metrics), options.backoff()
    for step in EvalSampler(store.lengths, store.counts, batch_sizes.eval_rows, collate.width):
        batch = dataset[step].to(loaded.device)
        with loaded.inference():
            add_batch(forward, batch, backoff, f"in a batch of {counted(len(step.samples), 'row')}")
    skipped, notes = len(rows.bad_rows.reasons), (*loaded.notes, *rows.notes, *prepared.warnings)
    return EvaluationReport(found.folder, source, len(store), metrics.compute(), metrics.details(), skipped, notes)
