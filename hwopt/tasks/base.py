"""Tasks: what a sample, a loss and a metric are. The training loop uses only the interface of `Task`.

`Task.prepare` is the same for all tasks: a subclass says how rows become samples (`samples`), and samples a store (`store`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hwopt.config.job import LOSS_ARGUMENTS, Job, TaskOptions
from hwopt.data.sources.reading import refuse_missing
from hwopt.data.sources.rows import Rows
from hwopt.data.stores.token_store import Store, split_rows
from hwopt.data.tokenizer import LengthLimit, choose_padding, load_tokenizer, uses_token_types
from hwopt.data.tokenizer_training import trained_tokenizer
from hwopt.errors import InputError
from hwopt.model.config import load_config
from hwopt.model.facts import is_decoder
from hwopt.tasks.generators import Generation
from hwopt.tasks.model_builder import ModelBuilder
from hwopt.tasks.model_families import ENCODER_FAMILY, ModelFamily
from hwopt.tasks.predictors import TextPredictor
from hwopt.tasks.preparation import make_prepared, read_sources
from hwopt.tasks.prepared import ChatTokens, Named, Prepared, Samples, Trained
from hwopt.tasks.prepared_cache import PreparedCache
from hwopt.tasks.preview import Shown, spans_of
from hwopt.tasks.recognition import Recognised
from hwopt.text import listing, nearest

if TYPE_CHECKING:
    import pyarrow as pa
    import torch
    from numpy.typing import NDArray
    from transformers import PretrainedConfig

    from hwopt.data.batches.collate import Collate
    from hwopt.tasks.metrics import LossMetrics


class Task(ModelBuilder):
    """One kind of training. Its methods have no side effects, except that `prepare` writes caches."""

    def __init__(self, options: TaskOptions | None = None) -> None:
        """`options`: the job's table [task]; default: without options."""
        self.options = options or TaskOptions(kind=self.facts.kind)

    default_metric: ClassVar[str]
    metric_directions: ClassVar[dict[str, bool]]  # metric name -> whether a greater value is better
    pipeline_tag: ClassVar[str]  # the pipeline of transformers, and of the hub, for such a model
    several_labels: ClassVar[bool] = False
    """Whether the label of a sample is an array, float32 (labels,), instead of the number of a class."""
    generates: ClassVar[bool] = False  # whether a prediction is generated text
    models: ClassVar[ModelFamily] = ENCODER_FAMILY  # the models that `hwopt init` proposes

    @property
    def kind(self) -> str:
        return self.facts.kind

    @classmethod
    def check_job(cls, job: Job) -> None:
        """Raise ValueError for keys of the job that contradict each other, or that the task does not support."""

    @classmethod
    def check_loss(cls, job: Job) -> None:
        """Raise ValueError for a key that changes the loss (`LOSS_ARGUMENTS`) and that the loss of this task does not take."""
        taken = signature(cls.loss).parameters
        for key in job.task.loss_changes:
            if LOSS_ARGUMENTS[key] not in taken:
                raise ValueError(f"task.{key}: the loss of task.kind = {cls.facts.kind!r} has no such option; remove it")

    @classmethod
    def recognise(cls, table: pa.Table, chosen: bool) -> Recognised | str:
        """The columns of the table for this task, or what is missing: "no column looks like a label".

        `chosen`: the user chose this task, so columns that are less clear are taken too.
        """
        return "its columns are not recognised"

    def greater_is_better(self, name: str) -> bool:
        """Whether a greater value of the metric `name`, with or without "eval_", is better. Raises InputError if unknown."""
        short = name.removeprefix("eval_")
        if short not in self.metric_directions:
            known = [f"eval_{known}" for known in self.metric_directions]
            raise InputError(
                f"training.metric_for_best_model: {self.kind} has no metric {name!r}.{nearest(name, known)} "
                f"It has: {listing(known)}"
            )
        return self.metric_directions[short]

    def prepare(self, job: Job, config: PretrainedConfig, cache: Path, seed: int, max_positions: int | None = None) -> Prepared:
        """Read, check and tokenise the job's data, or load it from `cache`.

        `max_positions`: the model's longest input in tokens (see ModelFacts), None for no limit. `seed`: of the split by
        data.eval_fraction. Raises DataError for problems of the data, InputError for problems of the job.
        """
        LengthLimit(job.data.max_length, max_positions)  # refuses a limit above the model's
        refuse_missing(job.data)
        trained = Trained(job, config, self.named_tokenizer(job, config), (), max_positions)
        known = PreparedCache(type(self), trained, cache, seed)
        return known.load(self.fit_tokenizer) or known.save(self._prepare(trained, cache, seed))

    def _prepare(self, trained: Trained, cache: Path, seed: int) -> Prepared:
        """`prepare` without an entry of the cache. `trained`: without label names, and without a tokenizer if one is trained."""
        job, config, tokenizer = trained.job, trained.config, trained.tokenizer
        sources = read_sources(job)
        parts = {part: self.samples(rows, job) for part, rows in sources.items()}
        named = self.name_labels(parts["train"], sources["train"], job, config)
        parts |= {part: self.only_known(samples, named.names) for part, samples in parts.items() if part != "train"}
        if job.data.eval_fraction is not None:
            parts["train"], parts["eval"] = self.split(parts["train"], job.data.eval_fraction, seed)
        if tokenizer is None:
            decoder = self.facts.target == "next_token" or is_decoder(config)
            tokenizer = trained_tokenizer(self.plain_texts(parts["train"]), job, config, decoder, cache)
        tokens = self.fit_tokenizer(tokenizer, job, parts["train"].is_chat)
        trained = replace(trained, tokenizer=tokenizer, label_names=named.names)
        stores = {part: self.store(samples, trained, cache, seed if part == "train" else None) for part, samples in parts.items()}
        held_out = parts["eval"].places.numbers if job.data.eval_fraction is not None else ()
        prepared = make_prepared(stores, trained, chat_tokens=tokens, held_out=held_out)
        prepared = self.with_class_weights(prepared, job)
        prepared.notes.extend([*named.notes, *self.notes(parts, trained, prepared)])
        prepared.report_bad_rows(*sources.values())
        return prepared

    def samples(self, rows: Rows, job: Job) -> Samples:
        """What the model reads of each row, with its label. Rows that cannot be used are marked as bad.

        Raises DataError if a column is missing or unsuitable.
        """
        raise NotImplementedError

    def name_labels(self, samples: Samples, rows: Rows, job: Job, config: PretrainedConfig) -> Named:
        """The names of the labels of the training data, by number. Raises DataError if they cannot be trained."""
        return Named()

    def only_known(self, samples: Samples, names: tuple[str, ...]) -> Samples:
        """The samples with labels that are in `names`; the others become bad rows."""
        return samples

    def split(self, samples: Samples, fraction: float, seed: int) -> tuple[Samples, Samples]:
        """(training, evaluation) samples for data.eval_fraction."""
        kept, held = split_rows(len(samples), fraction, seed, samples.places.source)
        return samples.take(kept.tolist()), samples.take(held.tolist())

    def named_tokenizer(self, job: Job, config: PretrainedConfig) -> Any:
        """The tokenizer of the job, else the model's own; None if one is trained on the texts."""
        if job.model.tokenizer is not None:
            return load_tokenizer(job.model.tokenizer)
        return None if job.model.name is None else load_tokenizer(job.model.name, job.model.revision, key="model.name")

    def fit_tokenizer(self, tokenizer: Any, job: Job, chat: bool) -> ChatTokens:
        """Set the special tokens of the job and, if the samples are conversations (`chat`), its chat template."""
        return ChatTokens()

    def plain_texts(self, samples: Samples) -> list[str]:
        """The texts to train a tokenizer on."""
        return [text for column in samples.columns for text in column]

    def store(self, samples: Samples, trained: Trained, cache: Path, seed: int | None = None) -> Store:
        """The store of `samples`, from `cache` or written now. `seed`: of augmentations, for training samples only."""
        raise NotImplementedError

    def notes(self, parts: Mapping[str, Samples], trained: Trained, prepared: Prepared) -> list[str]:
        """Lines for the screen about the samples of the `parts` train, eval and test."""
        return []

    def with_class_weights(self, prepared: Prepared, job: Job) -> Prepared:
        """`prepared` with the weight of each class in the training loss, if the task has classes."""
        return prepared

    def loss(self, outputs: Any, targets: torch.Tensor) -> tuple[torch.Tensor, int | torch.Tensor]:
        """(summed loss, a float32 scalar; number of labels in the sum) of a micro-batch, from its logits.

        It has an argument for each key of [task] that it takes (`hwopt.config.job.LOSS_ARGUMENTS`): `smoothing` for
        label_smoothing; `weight`, a tensor of a weight for each label, for class_weights, and then it returns the sum of
        the weights instead of the number of labels.
        """
        raise NotImplementedError

    def training_loss(
        self, prepared: Prepared, device: torch.device | str
    ) -> Callable[..., tuple[torch.Tensor, int | torch.Tensor]]:
        """The loss that is trained: `loss`, with what the job changes in it. An evaluation computes `loss` alone."""
        options: dict[str, Any] = {LOSS_ARGUMENTS[key]: value for key, value in self.options.loss_changes.items()}
        if prepared.class_weights is not None:
            import torch

            options["weight"] = torch.tensor(prepared.class_weights, device=device)
        return partial(self.loss, **options) if options else self.loss

    def guessed_loss(self, prepared: Prepared, vocab_size: int) -> float | None:
        """The `loss` of a model that gives every label the same probability; None if unknown. `vocab_size`: 0 if unknown."""
        return math.log(vocab_size) if self.facts.target == "next_token" and vocab_size > 1 else None

    def metrics(self, prepared: Prepared, device: torch.device | str) -> LossMetrics:
        """Empty metrics for one evaluation."""
        raise NotImplementedError

    def read_inputs(self, rows: Rows, job: Job) -> Sequence[Any]:
        """What a prediction needs of each row of the table, for `Predictor.encode`. Rows that cannot be used are marked as bad.

        Raises DataError if a column is missing.
        """
        raise NotImplementedError

    def predictor(self, trained: Trained, model: Any, generation: Generation) -> TextPredictor:
        """What predicts rows with `model`."""
        raise NotImplementedError

    def evaluation_store(self, trained: Trained, rows: Rows, cache: Path) -> Store:
        """The prepared `rows`, with labels numbered as the model numbers them. Raises DataError as `prepare` does."""
        samples = self.only_known(self.samples(rows, trained.job), trained.label_names)
        return self.store(samples, trained, cache)

    def collate(self) -> type[Collate]:
        """The class that makes step batches from the samples."""
        from hwopt.data.batches.collate import Collate

        return Collate

    def load_processing(self, folder: str) -> Any:
        """The tokenizer in the folder of a trained model. Raises InputError."""
        tokenizer = load_tokenizer(folder, key=folder)
        if tokenizer.pad_token is None:
            choose_padding(tokenizer, set())
        return tokenizer

    def usage(self, where: str) -> str:
        """Python code that loads the model from the folder or hub name `where` and uses it, for the model card."""
        return (
            "from transformers import pipeline\n\n"
            f'model = pipeline("{self.pipeline_tag}", model="{where}")  # or the path of this folder\nprint(model("…"))'
        )

    def placeholder(self, job: Job, config: PretrainedConfig, length: int, target: int | None = None) -> dict[str, NDArray[Any]]:
        """A sample of `length` tokens without content, with the arrays of `TokenStore.row`, to measure memory with.

        `target`: tokens of the target that an encoder-decoder writes; default: the most that the job allows.
        """
        import numpy as np

        sample: dict[str, NDArray[Any]] = {"input_ids": np.zeros(length, np.int64)}
        if len(job.data.text) == 2 and uses_token_types(config):
            sample["token_type_ids"] = np.zeros(length, np.int64)
        if self.facts.target == "sample":
            several = self.several_labels
            sample["row_labels"] = np.zeros(config.num_labels, np.float32) if several else np.zeros((), np.int64)
        else:
            sample["labels"] = np.zeros(length, np.int64)
        return sample

    def generated_tokens(self, job: Job) -> int:
        """The most tokens that an evaluation generates for a row; 0 if it generates none."""
        return 0

    def show(self, prepared: Prepared, row: Mapping[str, NDArray[Any]]) -> Shown:
        """The sample `row` of `TokenStore.row`, for `hwopt plan --sample 1`: its decoded tokens and its label."""
        tokens = row["input_ids"].tolist()
        spans = spans_of(prepared.tokenizer, tokens, [False] * len(tokens))
        return Shown(spans, self.label_text(prepared, row["row_labels"]))

    def label_text(self, prepared: Prepared, label: NDArray[Any]) -> str:
        """The label of a sample as text; by default the name of its number."""
        names = prepared.label_names
        return names[label.item()] if names else str(label.item())

    def load_config(self, job: Job) -> PretrainedConfig:
        """The config of the job's model. Raises InputError."""
        return load_config(job.model.name, job.model.config, job.model.revision)
