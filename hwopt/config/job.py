"""Job: what to train. It comes from a TOML file, from `--set`, or from both; every key keeps its file and line."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from hwopt.config.renames import job_key, with_assignments
from hwopt.config.task_kinds import task_class, task_facts, task_kinds
from hwopt.config.toml import Document, parse_assignment, read_toml
from hwopt.config.validation import validate
from hwopt.errors import InputError
from hwopt.system.paths import path_kind
from hwopt.text import listing, nearest, truncate

Scheduler = Literal["linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt"]


class Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def _as_tuple(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    return (value,) if isinstance(value, str) else value


def _typed(path: str) -> str:
    """`path`. Raises ValueError if an escape changed it: TOML reads "D:\\train" with a tab."""
    if any(ord(letter) < 32 for letter in path):
        raise ValueError(
            f"{truncate(path)} contains a control character; in double quotes a backslash starts an escape: "
            "put a path into single quotes, or write it with '/'"
        )
    return path


def _encoding(name: str) -> str:
    """`name`. Raises ValueError if Python has no text encoding of that name."""
    try:
        "".encode(name)
    except (LookupError, ValueError):
        raise ValueError(f"{truncate(name)} is no text encoding of Python. Common ones: utf-8, cp1252, latin-1, utf-16") from None
    return name


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


def _repository(name: str) -> str:
    """`name`. Raises ValueError if the hub does not allow it as the name of a repository."""
    part = r"(?=.{1,96}$)[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
    owner, slash, own = name.rpartition("/")
    if not all(re.fullmatch(part, each) for each in (own, *([owner] if slash else []))) or "--" in name or ".." in name:
        raise ValueError(f'{truncate(name)} is no repository name; expected OWNER/NAME, such as "me/my-model"')
    return name


def _kind(value: Any) -> Any:
    """`value`. Raises an error of pydantic if no such task is installed."""
    kinds = task_kinds()
    if value not in kinds:
        raise PydanticCustomError("literal_error", "not an installed task", {"expected": " or ".join(map(repr, kinds))})
    return value


def _add_kinds(schema: dict[str, Any]) -> None:
    schema["enum"] = task_kinds()


Kind = Annotated[str, BeforeValidator(_kind), Field(json_schema_extra=_add_kinds)]
"""The name of an installed task."""
Source = Annotated[str, AfterValidator(_typed)]


TEXT_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 2}]}
Texts = Annotated[tuple[str, ...], BeforeValidator(_as_tuple), Field(min_length=1, max_length=2), WithJsonSchema(TEXT_SCHEMA)]


COLUMNS_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]}
Columns = Annotated[tuple[str, ...], BeforeValidator(_as_tuple), Field(min_length=1), WithJsonSchema(COLUMNS_SCHEMA)]


class FrozenDict(dict[str, Any]):
    """A dict whose keys cannot change, so that a plugin cannot change the job that it reads."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError("the job is read-only; a plugin writes into the recipe only")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[type[FrozenDict], tuple[dict[str, Any]]]:
        return FrozenDict, (dict(self),)


def _frozen(value: Any) -> Any:
    """`value`, read-only if it is a dict."""
    return FrozenDict(value) if isinstance(value, dict) else value


class Model(Table):
    """Either `name` (trained weights) or `config` (random weights)."""

    name: Source | None = None
    """A hub name, or a folder made with save_pretrained()."""
    config: Annotated[dict[str, Any], AfterValidator(FrozenDict)] | None = None
    """Keys of the architecture's config, with `model_type`."""
    tokenizer: Source | None = None
    """A hub name or folder; default: the model's own, or one trained on the job's texts."""
    revision: str | None = None

    @model_validator(mode="after")
    def _one_of(self) -> Model:
        if (self.name is None) == (self.config is None):
            raise ValueError('give either name = "…" (trained weights) or config = { model_type = "…" } (random weights)')
        if self.name == "":
            raise ValueError("name is empty; give a hub name or a folder")
        return self

    @property
    def label(self) -> str:
        """A short name for the screen."""
        return self.name or f"{(self.config or {}).get('model_type')} (random)"


class Data(Table):
    train: Source = Field(min_length=1)
    """csv, tsv, jsonl, json, parquet or txt file, a `datasets` folder, or a hub name."""
    eval: Source | None = None
    eval_fraction: float | None = Field(default=None, gt=0, lt=1)
    test: Source | None = None
    """Evaluated once, at the end, with the weights of `final/`."""
    split: str | None = None
    """Split of a hub name or `datasets` folder; default: train."""
    eval_split: str | None = None
    test_split: str | None = None
    text: Texts = ("text",)
    """One column, or two for pairs."""
    label: Columns = ("label",)
    """The column with the labels; several ones for regression and multi-label classification."""
    label_delimiter: str = Field(default=",", min_length=1)
    """Multi-label classification: what separates the labels of a text."""
    prompt: str | None = None
    """Causal language modelling: the prompt's column, masked out of the loss; goes with `completion`."""
    completion: str | None = None
    messages: str | None = None
    """Causal language modelling: the column with conversations; default: recognised by its name and the text column's absence."""
    chat_template: str | None = None
    """A Jinja file, or "chatml"; default: the tokenizer's own template."""
    assistant_turns: Literal["all", "last"] = "all"
    """The answers in a conversation that count in the loss."""
    sample_prompts: tuple[str, ...] = ()
    """Causal language modelling: prompts for which the model writes a sample after each evaluation."""
    max_length: int | None = Field(default=None, ge=2)
    """In tokens; longer texts are cut."""
    encoding: Annotated[str, AfterValidator(_encoding)] | None = None
    """Of text files, such as "cp1252"; default: UTF-8, or UTF-16 with a byte order mark."""
    delimiter: str | None = Field(default=None, min_length=1, max_length=1)
    """Of csv and tsv files; default: guessed from the header of a csv file, a tab in a tsv file."""
    on_bad_row: Literal["skip", "stop"] = "skip"
    """Skip unusable rows and list them, or stop at the first one."""
    max_bad_rows: float | None = Field(default=None, ge=0, le=1)
    """Allowed fraction of unusable rows of a file; default: 0.05, and no label may occur in unusable rows only."""

    @field_validator("sample_prompts", mode="before")
    @classmethod
    def _prompts(cls, value: Any) -> Any:
        return _as_tuple(value)

    @model_validator(mode="after")
    def _consistent(self) -> Data:
        if self.eval is not None and self.eval_fraction is not None:
            raise ValueError("eval and eval_fraction exclude each other")
        if (self.prompt is None) != (self.completion is None):
            raise ValueError("prompt and completion go together")
        if self.messages is not None and self.prompt is not None:
            raise ValueError("messages, and prompt with completion, exclude each other")
        return self


class Task(Table):
    kind: Kind = "text-classification"
    """What the model learns to predict; installed packages may add kinds."""
    ignore_router_loss: bool = False
    """Train a mixture of experts without its load-balancing loss, which has no exact count over micro-batches."""
    class_weights: Annotated[
        Literal["balanced"] | dict[str, float] | None, BeforeValidator(_class_weights), AfterValidator(_frozen)
    ] = None
    """Classification: weight of each label in the training loss; "balanced": inversely proportional to its frequency."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """Share of the training loss that is taken over all labels or tokens equally."""


class Training(Table):
    """Hyperparameters, in Hugging Face's words. Steps are optimizer steps."""

    num_train_epochs: float = Field(default=3.0, gt=0)
    max_steps: int | None = Field(default=None, ge=1)
    learning_rate: float = Field(default=5e-5, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    adam_epsilon: float = Field(default=1e-8, gt=0)
    max_grad_norm: float = Field(default=1.0, ge=0)
    """0: no clipping."""
    lr_scheduler_type: Scheduler = "linear"
    warmup_ratio: float | None = Field(default=None, ge=0, le=1)
    warmup_steps: int | None = Field(default=None, ge=0)
    logging_steps: int = Field(default=10, ge=1)
    eval_steps: int | None = Field(default=None, ge=1)
    """Default: at the end of each epoch."""
    save_steps: int | None = Field(default=None, ge=1)
    """Write a checkpoint every N steps, in addition to those of save_minutes."""
    save_minutes: float = Field(default=15.0, ge=0)
    """Write a checkpoint every N minutes; 0: never. SIGTERM and SIGINT always write one."""
    save_total_limit: int = Field(default=2, ge=0)
    """Checkpoints to keep, the newest first; 0 keeps all. The best weights are kept in addition."""
    hang_timeout: float = Field(default=600.0, ge=0)
    """Seconds without a micro-batch after which the run ends with exit code 9 (the first step: ten times as many); 0: never."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What to do after an update is skipped because a gradient or a loss is not finite."""
    nonfinite_limit: int = Field(default=50, ge=1)
    """Consecutive updates that "skip" or a loss scaler may skip."""
    nonfinite_fraction: float = Field(default=0.1, gt=0, le=1)
    """Fraction of all updates that "skip" may skip; one skipped update is always allowed."""
    loss_spike: Literal["warn", "stop", "off"] = "warn"
    """What to do if a logged loss is far above the recent ones."""
    metric_for_best_model: str | None = None
    greater_is_better: bool | None = None
    early_stopping_patience: int | None = Field(default=None, ge=1)
    """End the run after so many evaluations in a row without a better metric for the best model; default: never."""
    early_stopping_threshold: float = Field(default=0.0, ge=0)
    """An improvement counts for early stopping if it is greater than this."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    push_to_hub: bool = False
    """Upload `final/` to the hub at the end of the run."""
    hub_model_id: Annotated[str, AfterValidator(_repository)] | None = None
    """The repository to upload to, such as "me/my-model"."""
    hub_private_repo: bool = False
    """Create the repository as a private one."""

    @model_validator(mode="after")
    def _repository_to_push_to(self) -> Training:
        if self.push_to_hub and self.hub_model_id is None:
            raise ValueError('push_to_hub needs hub_model_id = "OWNER/NAME"')
        return self

    @model_validator(mode="after")
    def _one_warmup(self) -> Training:
        if self.warmup_ratio is not None and self.warmup_steps is not None:
            raise ValueError("warmup_ratio and warmup_steps exclude each other")
        return self


class Job(Table):
    model: Model
    data: Data
    task: Task = Task()
    training: Training = Training()

    @model_validator(mode="after")
    def _of_task(self) -> Job:
        chosen = task_class(self.task.kind)
        for key in SPECIAL_KEYS:
            table, name = key.split(".")
            given = getattr(self, table)
            if key not in chosen.facts.keys and getattr(given, name) != type(given).model_fields[name].default:
                owners = [kind for kind in task_kinds() if key in task_facts(kind).keys]
                raise ValueError(f"{key} belongs to task.kind = {listing([repr(kind) for kind in owners])}")
        chosen.check_job(self)
        return self


SPECIAL_KEYS = (
    *("data.prompt", "data.completion", "data.messages", "data.chat_template", "data.assistant_turns", "data.sample_prompts"),
    *("data.label_delimiter", "task.class_weights"),
)
"""Keys that only some tasks read; `TaskFacts.keys` names those of a task."""
TABLES = tuple(Job.model_fields)


@dataclass(frozen=True)
class JobFile:
    """A job and the document that it came from."""

    job: Job
    document: Document
    plugins: Document | None = None
    """The table `plugins` of the job's file: options on top of those of the profile."""

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
    if kind == "missing" and path.is_symlink():
        raise InputError(f"{path}: is a link that leads nowhere ({truncate(os.readlink(path))}); mend it, or take it away")
    if kind == "missing":
        raise InputError(f"{path}: no such job file; give a TOML file, or leave it out for the embedded demo")
    document = read(path)
    if (plugins := document.data.get("plugins")) is None:
        return make_job(document, assignments)
    without = replace(document, data={key: value for key, value in document.data.items() if key != "plugins"})
    return replace(make_job(without, assignments), plugins=replace(document, data={"plugins": plugins}, notes=()))


ALTERNATIVES = (
    {("model", "name"), ("model", "config")},
    {("data", "eval"), ("data", "eval_fraction")},
    {("training", "warmup_ratio"), ("training", "warmup_steps")},
)
"""Keys that exclude each other: one that `--set` gives replaces the other one of the file."""


def without_alternatives(document: Document, assignments: Sequence[str]) -> Document:
    asked = {parse_assignment(assignment)[0][:2] for assignment in assignments}
    dropped = {key for pair in ALTERNATIVES for key in pair if pair & asked and key not in asked}
    data = {
        name: {key: value for key, value in table.items() if (name, key) not in dropped} if isinstance(table, dict) else table
        for name, table in document.data.items()
    }
    return replace(document, data=data)


def make_job(document: Document, assignments: Sequence[str] = ()) -> JobFile:
    for assignment in assignments:
        key, _ = parse_assignment(assignment)
        if key[0] not in (*TABLES, "plugins"):
            known = (*TABLES, "plugins")
            raise InputError(
                f"--set {key[0]}…: there is no table {key[0]!r}.{nearest(key[0], known)} It is one of: {listing(known)}"
            )
    document = with_assignments(without_alternatives(document, assignments), assignments, TABLES, job_key)
    job = validate(Job, document)
    assert job is not None  # without `problems`, validate raises
    return JobFile(job, document)
