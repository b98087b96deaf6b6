"""Predict the rows of a file with a trained model, and write them with the predictions to another file.

The rows are predicted window by window: within one they are batched by length, and written in their own order when all of them
are done. A row that cannot be used keeps its place, without a prediction.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, log2
from pathlib import Path
from typing import Any

import torch

from hwopt.data.batches.samplers import eval_batches
from hwopt.data.batches.step_batch import Widths
from hwopt.data.sources.location import expand, path_of
from hwopt.data.sources.reading import read_options
from hwopt.data.sources.rows import Rows
from hwopt.distributed.oom_backoff import OomBackoff
from hwopt.errors import DataError, InputError
from hwopt.inference.output import free_names, refuse_table_output, replacing
from hwopt.inference.settings import InferenceOptions
from hwopt.inference.trained_model import RunModel, TrainedModel, find_run_model, load_trained_model
from hwopt.plugin import BatchSizes
from hwopt.tasks.generators import Generation
from hwopt.tasks.predictors import ModelInput, TextPredictor
from hwopt.tasks.registry import make_task
from hwopt.text import counted, listing
from hwopt.training.evaluation import each_row_once


@dataclass(frozen=True)
class PredictionReport:
    """How a prediction went."""

    output: Path
    rows: int
    """Rows in the output."""
    predicted: int
    """Rows with a prediction."""
    columns: tuple[str, ...]
    """The names of the new columns."""
    without_prediction: dict[str, str]
    """Place of each row of the output without a prediction -> the reason."""
    unreadable: dict[str, str]
    """Place of each row that could not be read, which is not in the output -> the reason."""
    notes: tuple[str, ...] = ()


def predict(run: Path, source: str, output: Path, cache: Path, options: InferenceOptions) -> PredictionReport:
    """Write the rows of `source` with the predictions of the model of `run` to `output` (csv, jsonl or parquet).

    Raises InputError, DataError, StorageError or DoesNotFitError with a message that says what to change.
    """
    refuse_table_output(output, options.overwrite, [path_of(file) for file in expand(source)])
    found = find_run_model(run, options.assignments)
    generation = options.generation
    if generation is not None and not make_task(found.job).generates:
        raise InputError(
            f"--max-new-tokens and the other options of generation: {run} is a run of task.kind = {found.job.task.kind!r}, "
            "which generates no text. Omit these options"
        )
    rows = read_source(source, found)
    inputs = make_task(found.job).read_inputs(rows, found.job)
    return write_predictions(load_trained_model(found, cache), rows, inputs, output, options)


def write_predictions(
    loaded: TrainedModel, rows: Rows, inputs: Sequence[Any], output: Path, options: InferenceOptions
) -> PredictionReport:
    """Write `rows`, of which the model reads `inputs`, with its predictions to `output`. Raises as `predict` does."""
    generation = options.generation
    predictor = loaded.task.predictor(loaded.trained, loaded.model, generation or Generation())
    names = free_names(tuple(predictor.columns), rows.table.column_names)
    sizes, backoff = options.batch(loaded.settings), options.backoff()
    window = predictor.window_batches * sizes.eval_rows()
    count = rows.table.num_rows
    if generation is not None:
        torch.manual_seed(generation.seed)
    with replacing(output, {names[name]: kind for name, kind in predictor.columns.items()}) as writer:
        for start in range(0, count, window):
            stop = min(start + window, count)
            results = predict_window(loaded, predictor, sizes, backoff, rows, inputs, range(start, stop))
            columns = zip(*results, strict=True)
            originals = {
                name: {row - start: value for row in range(start, stop) if (value := values.get(row)) is not None}
                for name, values in rows.non_strings.items()
            }
            writer.write(rows.table.slice(start, stop - start), dict(zip(names.values(), columns, strict=True)), originals)
            options.progress(stop, count)
        predicted = len(usable_rows(rows, range(count)))
        if not predicted:
            raise DataError(f"{rows.source}: no row can be used. {rows.bad_rows.summary()}. Check that this is the right file")
    renamed = [f"{new!r} instead of {name!r}" for name, new in names.items() if new != name]
    notes = [*rows.notes, *([f"new columns: {listing(renamed)}, which the input has already"] if renamed else [])]
    inside = [repr(field.name) for field in rows.table.schema if re.search(r"binary(?!:)", str(field.type))]
    if inside and output.suffix.lower() != ".parquet":
        notes.append(f"{output} lacks the bytes in {listing(inside)}, which only a parquet file can hold")
    return PredictionReport(
        output, count, predicted, tuple(names.values()), reasons_of(rows, True), reasons_of(rows, False), (*loaded.notes, *notes)
    )


def reasons_of(rows: Rows, in_table: bool) -> dict[str, str]:
    """Place -> reason of the bad rows that are, or are not, in the table."""
    read = set(rows.places.numbers)
    bad = sorted(rows.bad_rows.reasons.items())
    return {rows.bad_rows.place(number): why for number, why in bad if (number in read) == in_table}


def read_source(source: str, found: RunModel) -> Rows:
    """The rows of `source`, read as the job reads its data; no number of bad rows is an error."""
    options = replace(read_options(found.job.data), strict=False, max_bad_rows=1.0, max_rows=None, streaming=False)
    rows = found.rows(source, options)
    names = rows.table.column_names
    if names.count("") > 1:  # empty columns of a spreadsheet: in the output they are told apart by their places
        names = [name or f"column {number}" for number, name in enumerate(names, 1)]
        rows = replace(rows, table=rows.table.rename_columns(names))
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(f"{source}: has {names.count(twice[0])} columns named {twice[0]!r}; rename all but one")
    return rows


def usable_rows(rows: Rows, window: range) -> list[int]:
    """The table rows of `window` that are not bad."""
    return [row for row in window if rows.places.numbers[row] not in rows.bad_rows.reasons]


def predict_window(
    loaded: TrainedModel,
    predictor: TextPredictor,
    sizes: BatchSizes,
    backoff: OomBackoff,
    rows: Rows,
    inputs: Sequence[Any],
    window: range,
) -> list[tuple[Any, ...]]:
    """The values of the new columns for each row of `window`; rows that cannot be used are marked, and get None."""
    encoded: dict[int, ModelInput] = {}
    usable = usable_rows(rows, window)
    for row, found in zip(usable, predictor.encode([inputs[row] for row in usable]), strict=True):
        if isinstance(found, str):
            rows.mark_bad(row, found)
        else:
            encoded[row] = found
    results: dict[int, tuple[Any, ...]] = {}
    longest_first = sorted(encoded, key=lambda row: -predictor.length(encoded[row]))
    lengths = [predictor.length(encoded[row]) for row in longest_first]
    for place in eval_batches(lengths, sizes.eval_rows, Widths(multiple=sizes.pad_to_multiple_of).of):
        part = longest_first[place]
        results.update(zip(part, predict_batch(loaded, predictor, [encoded[row] for row in part], backoff), strict=True))
    nothing = (None,) * len(predictor.columns)
    return [results.get(row, nothing) for row in window]


def predict_batch(
    loaded: TrainedModel, predictor: TextPredictor, batch: Sequence[ModelInput], backoff: OomBackoff
) -> list[tuple[Any, ...]]:
    """The predictions of the rows of `batch`, the longest first, in smaller parts if memory runs out."""
    results: list[tuple[Any, ...]] = []
    longest, rows = predictor.length(batch[0]), len(batch)

    def work(rung: int, first_row: int) -> Iterator[int]:
        size = ceil(rows / 2**rung)
        for begin in range(first_row, rows, size):
            inputs = predictor.batch(batch[begin : begin + size], loaded.settings.batch.pad_to_multiple_of)
            with loaded.inference():
                results.extend(predictor.predict({key: tensor.to(loaded.device) for key, tensor in inputs.items()}))
            yield len(results)

    def largest(rung: int) -> int:
        return ceil(rows / (1 << rung)) * longest

    each_row_once(work, rows, ceil(log2(rows)), largest, backoff, f"in a batch of {counted(rows, 'row')}")
    return results
