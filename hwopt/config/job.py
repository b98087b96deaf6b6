"""Job: what to train. It comes from a TOML file, from `--set`, or from both; every key keeps its file and line."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from hwopt.config.job_model import Model
from hwopt.config.job_sources import Sources, TrainingSources, with_paths_from
from hwopt.config.job_training import Training
from hwopt.config.job_values import Columns, Encoding, Table, Texts, as_tuple
from hwopt.config.task_kinds import kinds_that_read, task_class, task_kinds
from hwopt.config.toml import Document, parse_assignment, read_toml, with_assignments
from hwopt.config.validation import validate
from hwopt.errors import InputError
from hwopt.system.paths import path_kind
from hwopt.text import listing, nearest, truncate

PartName = Annotated[str, Field(pattern=r"^[A-Za-z0-9-]+$")]


class Data(Table):
    train: TrainingSources
    """csv, tsv, jsonl, json, parquet or txt file, a glob, a `datasets` folder, or a hub name; a list of them; or a mixture."""
    eval: Sources | None = None
    eval_fraction: float | None = Field(default=None, gt=0, lt=1)
    more_eval: dict[PartName, Sources] = Field(default_factory=dict)
    """Name -> further data, evaluated after `eval` and logged as eval_NAME_…."""
    test: Sources | None = None
    """Evaluated once, at the end, with the weights of `final/`."""
    split: str | None = None
    """Split of a hub name or `datasets` folder; default: train."""
    eval_split: str | None = None
    test_split: str | None = None
    max_rows: int | None = Field(default=None, ge=1)
    """Read the first rows of each source only."""
    streaming: bool = False
    """Read hub data sets row by row, without downloading all of their files; needs `max_rows`."""
    text: Texts = ("text",)
    """One column, or two for pairs."""
    label: Columns = ("label",)
    """The column with the labels; several ones for regression and multi-label classification."""
    decimal: Literal[".", ","] = "."
    """The decimal separator of numbers that files hold as text, such as the targets of regression in a csv file."""
    label_delimiter: str = Field(default=",", min_length=1)
    """Multi-label classification: what separates the labels of a text."""
    image: str = "image"
    """Image classification: column with paths or images."""
    augmentation: Annotated[tuple[Literal["crop", "flip"], ...], BeforeValidator(as_tuple)] = ("crop", "flip")
    """Image classification: random changes of training images; [] for none."""
    max_target_length: int = Field(default=128, ge=2)
    """Sequence-to-sequence: in tokens; longer targets are cut."""
    prompt: str | None = None
    """Causal language modelling: the prompt's column, masked out of the loss; goes with `completion`."""
    completion: str | None = None
    blocks: bool | None = None
    """Causal language modelling: join the texts and cut them into blocks of max_length; default: text files yes, columns no."""
    messages: str | None = None
    """Causal language modelling: the column with conversations; default: recognised by its name."""
    chat_template: str | None = None
    """A Jinja file, or "chatml"; default: the tokenizer's own template."""
    eos_token: str | None = Field(default=None, min_length=1)
    """Causal language modelling: the tokenizer's end-of-text token in training and in final/; default: its own."""
    assistant_turns: Literal["all", "last"] = "all"
    """The answers in a conversation that count in the loss."""
    sample_prompts: Annotated[tuple[str, ...], BeforeValidator(as_tuple)] = ()
    """Causal language modelling: prompts for which the model writes a sample after each evaluation."""
    max_length: int | None = Field(default=None, ge=2)
    """In tokens; longer texts are cut."""
    format: Literal["csv", "tsv", "jsonl", "json", "parquet", "txt", "conll"] | None = None
    """Of all files; default: by the extension of each file."""
    encoding: Encoding | None = None
    """Of text files, such as "cp1252"; default: UTF-8, or UTF-16 with a byte order mark."""
    delimiter: str | None = Field(default=None, min_length=1, max_length=1)
    """Of csv and tsv files; default: guessed from the header of a csv file, a tab in a tsv file."""
    on_bad_row: Literal["skip", "stop"] = "skip"
    """Skip unusable rows and list them, or stop at the first one."""
    max_bad_rows: float | None = Field(default=None, ge=0, le=1)
    """Allowed fraction of unusable rows of a file; default: 0.05, and no label may occur in unusable rows only."""

    @model_validator(mode="after")
    def _consistent(self) -> Data:
        if self.eval is not None and self.eval_fraction is not None:
            raise ValueError("eval and eval_fraction exclude each other")
        if self.more_eval and (self.eval or self.eval_split or self.eval_fraction) is None:
            raise ValueError("more_eval needs eval or eval_fraction, the data that decides which weights are the best")
        if (self.prompt is None) != (self.completion is None):
            raise ValueError("prompt and completion go together")
        if self.messages is not None and self.prompt is not None:
            raise ValueError("messages, and prompt with completion, exclude each other")
        if self.blocks and (self.messages or self.prompt) is not None:
            raise ValueError("blocks = true is for plain text, not for messages or prompt with completion")
        if self.streaming and self.max_rows is None:
            raise ValueError("streaming needs max_rows = N: hwopt stores the tokens of all rows that it reads")
        return self

    @property
    def held_out(self) -> dict[str, tuple[Sources, str | None]]:
        """Name of each part with a source of its own beside the training data -> (source, split)."""
        parts = {"eval": (self.eval, self.eval_split), "test": (self.test, self.test_split)}
        parts |= {f"eval_{name}": (sources, self.eval_split) for name, sources in self.more_eval.items()}
        return {part: (sources, split) for part, (sources, split) in parts.items() if sources is not None}


def _class_weights(value: Any) -> Any:
    """`value`. Raises ValueError if it is neither "balanced" nor a table of positive weights."""
    if value is None or value == "balanced":
        return value
    if not isinstance(value, dict) or not value:
        raise ValueError(f'expected "balanced" or a table {{ LABEL = WEIGHT }}, got {truncate(value)}')
    for label, weight in value.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < float("inf"):
            raise ValueError(f"the weight of {truncate(label)} is {truncate(weight)}; expected a number above 0")
    return value


def _kind(value: Any) -> Any:
    """`value`. Raises an error of pydantic if no such task is installed."""
    kinds = task_kinds()
    if value not in kinds:
        raise PydanticCustomError("literal_error", "not an installed task", {"expected": " or ".join(map(repr, kinds))})
    return value


Kind = Annotated[
    str, BeforeValidator(_kind), Field(json_schema_extra=lambda schema: schema.update(enum=task_kinds()))
]  # the name of an installed task


LOSS_ARGUMENTS = {"class_weights": "weight", "label_smoothing": "smoothing"}
"""Key of [task] that changes the training loss -> the argument of `Task.loss` for its value. A task whose loss has none refuses
the key, and a plugin with a loss of its own does not apply with it."""


class TaskOptions(Table):
    kind: Kind = "text-classification"
    """What the model learns to predict; installed packages may add kinds."""
    ignore_router_loss: bool = False
    """Train a mixture of experts without its load-balancing loss, which is not a sum over micro-batches."""
    class_weights: Annotated[Literal["balanced"] | dict[str, float] | None, BeforeValidator(_class_weights)] = None
    """Classification: weight of each label in the training loss; "balanced": inversely proportional to its frequency."""
    rouge: bool = False
    """Sequence-to-sequence: generate a text for each evaluation sample and compare it with the target, by ROUGE."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """Share of the training loss that is taken over all labels or tokens equally."""

    @property
    def loss_changes(self) -> dict[str, Any]:
        """The keys that change the training loss, with their values, if they are set."""
        return {name: value for name in LOSS_ARGUMENTS if (value := getattr(self, name))}


class Job(Table):
    model: Model
    data: Data
    task: TaskOptions = TaskOptions()
    training: Training = Training()

    @model_validator(mode="after")
    def _of_task(self) -> Job:
        chosen = task_class(self.task.kind)
        tables = {"data": self.data, "task": self.task}
        given = {f"{name}.{key}" for name, table in tables.items() for key in table.model_dump(exclude_defaults=True)}
        for key in sorted(given - chosen.facts.keys):
            if owners := kinds_that_read(key):
                raise ValueError(f"{key} belongs to task.kind = {listing([repr(kind) for kind in owners])}")
        chosen.check_loss(self)
        chosen.check_job(self)
        return self


TABLES = tuple(Job.model_fields)


@dataclass(frozen=True)
class JobFile:
    job: Job
    document: Document
    plugins: Document | None = None  # the table `plugins` of the job's file: options on top of those of the profile

    def place(self, *key: str) -> str:
        return self.document.place(key)

    @contextmanager
    def placing(self) -> Iterator[None]:
        """Adds file and line to errors about keys that can only be checked with the model or the data."""
        try:
            yield
        except InputError as error:
            raise placed(error, self.place) from error


def placed(error: InputError, place: Callable[..., str]) -> InputError:
    """`error` with the `place` of the job's key that its message starts with."""
    key = re.match(rf"(?:{'|'.join(TABLES)})(?:\.[^:]*)?(?=:)", str(error))
    where = place(*key[0].split(".")) if key else ""
    return type(error)(f"{where}: {error}") if where else error


def load_job(path: Path, assignments: Sequence[str] = (), read: Callable[[Path], Document] = read_toml) -> JobFile:
    """The job of a file, with `--set` on top. Raises InputError with all problems of the file."""
    kind = path_kind(path, "JOB")
    if kind == "folder":
        raise InputError(f"{path}: is a folder; give the job's TOML file, such as {path / 'job.toml'}")
    if kind == "missing":
        near = nearest(path.stem, (each.stem for each in path.parent.glob("*.toml"))).replace("'?", ".toml'?")
        raise InputError(f"{path}: no such job file.{near} Give a TOML file, or omit it for ./job.toml, else the embedded demo")
    if path.suffix.lower() in DATA_EXTENSIONS:
        raise InputError(
            f"{path}: is not a job, which is a TOML file. If it holds your data, write a job for it: hwopt init {path}"
        )
    document = with_paths_from(path.parent, read(path))
    if (plugins := document.data.get("plugins")) is None:
        return make_job(document, assignments)
    without = replace(document, data={key: value for key, value in document.data.items() if key != "plugins"})
    return replace(make_job(without, assignments), plugins=replace(document, data={"plugins": plugins}))


DATA_EXTENSIONS = (".csv", ".tsv", ".jsonl", ".json", ".parquet", ".conll")  # of files that are given as JOB by mistake

ALTERNATIVES = (
    {("model", "name"), ("model", "config")},
    {("data", "eval"), ("data", "eval_fraction")},
    {("training", "warmup_ratio"), ("training", "warmup_steps")},
    {("training", "max_steps"), ("training", "num_train_epochs")},
)
"""Keys of which one is used: one that `--set` gives replaces the other one of the file."""


def without_alternatives(document: Document, assignments: Sequence[str]) -> Document:
    asked = {parse_assignment(assignment)[0][:2] for assignment in assignments}
    dropped = {key for pair in ALTERNATIVES for key in pair if pair & asked and key not in asked}
    data = {
        name: {key: value for key, value in table.items() if (name, key) not in dropped} if isinstance(table, dict) else table
        for name, table in document.data.items()
    }
    return replace(document, data=data)


def make_job(document: Document, assignments: Sequence[str] = ()) -> JobFile:
    known = (*TABLES, "plugins")
    for assignment in assignments:
        table = (key := parse_assignment(assignment)[0])[0]
        if table not in known:
            near = nearest(table, known) or f" If it is a plugin: plugins.{'.'.join(key)}."
            raise InputError(f"--set {table}…: there is no table {table!r}.{near} It is one of: {listing(known)}")
    document = with_assignments(without_alternatives(document, assignments), assignments, TABLES)
    job = validate(Job, document)
    assert job is not None  # without `problems`, validate raises
    return JobFile(job, document)
