"""`eval_rows.csv`: the rows that data.eval_fraction holds out, with what the best weights predict for them."""

from __future__ import annotations

from hwopt.data.sources.reading import read_all, read_options
from hwopt.errors import HwoptError
from hwopt.inference.predict import write_predictions
from hwopt.inference.settings import InferenceOptions, settings_of
from hwopt.inference.trained_model import TrainedModel
from hwopt.records.run_files import EVAL_ROWS
from hwopt.tasks.prepared import Trained
from hwopt.text import counted
from hwopt.training.evaluation import evaluating
from hwopt.training.run import Run

MOST_ROWS = 10_000
"""Of more rows that are held out the first ones are written: this takes as long as an evaluation of them on one device."""


def write_eval_rows(run: Run) -> None:
    """Write the file, after the last step and on rank 0 alone. A problem is a warning: the run is complete.

    Nothing is written for tasks without a label for each text, and where ranks hold parts of the model (ZeRO, FSDP).
    """
    held, facts, job = set(run.prepared.held_out[:MOST_ROWS]), run.task.facts, run.plan.job
    if not held or facts.target != "sample" or facts.inputs != "tokens" or run.engine.meets_in_micro_batches:
        return
    path, prepared = run.folder / EVAL_ROWS, run.prepared
    try:
        rows = read_all(job.data.train, job.data.split, read_options(job.data))
        rows = rows.take([row for row, number in enumerate(rows.places.numbers) if number in held])
        trained = Trained(job, run.inner_model.config, prepared.tokenizer, prepared.label_names, run.plan.model.max_positions)
        model = TrainedModel(run.task, trained, run.inner_model, run.device, settings_of(run))
        with evaluating(run):
            report = write_predictions(model, rows, run.task.read_inputs(rows, job), path, InferenceOptions())
    except (HwoptError, NotImplementedError) as error:  # the task of another package may have no predictor
        run.warn(f"{path} was not written: {error or type(error).__name__}")
        return
    run.say(f"The {counted(report.rows, 'row')} held out for evaluation, with predictions: {path}")
