"""A job and its plan as one readable training script without hwopt (script.jinja), whose losses equal those of `hwopt run`.

For text classification and causal language modelling of a model with trained weights, on one
device. The script splits each step into micro-batches of equal rows: the sum of their losses over
the count of the whole step is the same whatever the split.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from hwopt.data.sources.reading import read_all, read_options
from hwopt.errors import InputError
from hwopt.export.arguments import heading, plugin_words, words_of
from hwopt.model.config import load_config
from hwopt.planning.plan import Plan
from hwopt.tasks.registry import make_task
from hwopt.training.optimizer import warmup_steps

WORDS: tuple[str, ...] = ("per_device_train_batch_size", "gradient_accumulation_steps", "bf16", "fp16", "tf32", "optim")
WORDS += ("gradient_checkpointing", "torch_compile")
OPEN = 'with open(TRAIN, encoding="utf-8-sig", newline="") as file:\n    rows = '
READERS = {
    ".csv": OPEN + "list(csv.DictReader(file))",
    ".tsv": OPEN + 'list(csv.DictReader(file, delimiter="\\t"))',
    ".jsonl": OPEN + "[json.loads(line) for line in file if line.strip()]",
    ".parquet": 'rows = load_dataset("parquet", data_files=TRAIN, split="train").to_list()',
    "": "rows = load_dataset(TRAIN, split=SPLIT).to_list()",
}
"""Extension of the data -> how the script reads its rows; "": a name on the hub."""
NOT_HERE = "Not here: evaluation, checkpoints, resume, and the retry after an out-of-memory error."


def script_file(plan: Plan, cache: Path) -> str:
    """The text of the script for `plan`. Reads the job's data, for its labels and the number of its samples.

    Raises InputError for a job or a plan that the script cannot express.
    """
    refuse_unsupported(plan)
    job, training = plan.job, plan.training
    task = make_task(job)
    if task.facts.decoder and job.data.prompt is None:
        columns = read_all(job.data.train, job.data.split, read_options(job.data)).table.column_names
        if job.data.text[0] not in columns:
            raise InputError(f"--to script: needs data.prompt and data.completion, or a column {job.data.text[0]!r}")
    config = load_config(job.model.name, job.model.config, job.model.revision)
    prepared = task.prepare(job, config, cache, training.seed, max_positions=plan.model.max_positions)
    words, lines = plugin_words(plan, WORDS)
    lines += [NOT_HERE, "Losses equal those of `hwopt run` where the model has no dropout, whose random numbers differ."]
    share = f"ceil({training.warmup_ratio or 0} * total_steps)"
    layout: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True}
    environment = Environment(loader=PackageLoader("hwopt", "export"), undefined=StrictUndefined, **layout)
    environment.filters["repr"] = repr
    return environment.get_template("script.jinja").render(
        heading=heading(plan, "Training of", "script", lines),
        reader=READERS[Path(str(job.data.train)).suffix.lower()],
        task=task.facts, job=job, training=training, batch=plan.batch, prepared=prepared,
        words=dict.fromkeys(WORDS) | words, model_kwargs=model_kwargs(plan),
        warmup=share if training.warmup_steps is None else warmup_steps(training, 0),
        schedule_options=dict(training.lr_scheduler_kwargs),
    )  # fmt: skip


def refuse_unsupported(plan: Plan) -> None:
    """Raise InputError for what the script has no code for."""
    job, data = plan.job, plan.job.data
    changing = (entry for entry in plan.applied() if entry.plugin.effect == "method")
    methods = [entry.name for entry in changing if not dict(words_of(entry, plan, WORDS))]
    suffix = Path(data.train).suffix.lower() if isinstance(data.train, str) else None
    reasons = {
        "task.kind: only text-classification and causal-lm": job.task.kind not in ("text-classification", "causal-lm"),
        "model.name: needs a model with trained weights": job.model.name is None,
        f"data.train: needs one file ({', '.join(filter(None, READERS))}) or a name on the hub": suffix not in READERS,
        "data.eval_fraction: give the evaluation data as a file in data.eval": data.eval_fraction is not None,
        "data.messages: conversations are for --to trl": data.messages is not None,
        "task.ignore_router_loss: false has no code": plan.router_loss > 0,
        "data.eos_token: has no code": data.eos_token is not None,
        "model.freeze and model.train_only: have no code": job.model.chooses_weights,
        **{f"task.{key}: has no code": True for key in job.task.loss_changes if key != "label_smoothing"},
        **{f"plugins.{name}: changes what is trained, and has no code": True for name in methods},
        "training.early_stopping_patience: needs evaluation, which the script lacks": bool(plan.training.early_stopping_patience),
        "--world-size: the script is for one device": plan.world_size > 1,
    }
    if found := [reason for reason, unsupported in reasons.items() if unsupported]:
        raise InputError("--to script: " + "; ".join(found))


def model_kwargs(plan: Plan) -> dict[str, str]:
    """The keywords of from_pretrained as code; values of other types are in the list at the top of the script."""
    given = plan.recipe.model_kwargs.items()
    plain = {key: repr(value) for key, value in given if isinstance(value, str | int | float)}
    types = {key: str(value) for key, value in given if str(value).startswith("torch.")}
    return {"dtype": "torch.float32"} | plain | types
