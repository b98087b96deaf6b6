"""Tasks: what a sample, a loss and a metric are.

A task turns the job's files into token stores once, and loads the model with the head that fits. The loop knows tasks by this
class alone; a subclass gives `prepare`, `loss`, `metrics` and what the head needs.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast

from hwopt.config.job import Job
from hwopt.data.rows import Rows
from hwopt.data.token_store import TokenStore
from hwopt.data.tokenizer import check_vocabulary
from hwopt.data.tokenizer_training import job_vocab_size
from hwopt.errors import InputError
from hwopt.model.facts import AUTO_CLASSES
from hwopt.model.weights import load_weights
from hwopt.text import listing, nearest, truncate

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig


FORMAT = 2
"""Of the token stores; a change makes old ones be written anew."""
IGNORED = -100
"""The label of a token that no loss counts, as in transformers."""


@dataclass(frozen=True)
class Prepared:
    """Tokenised data and what belongs to it."""

    train: TokenStore
    eval: TokenStore | None
    tokenizer: Any
    """With a padding token, padding on the right."""
    label_names: tuple[str, ...] | None
    """By label number; None where labels are tokens."""
    notes: list[str] = field(default_factory=list)
    """For the screen."""
    left_out: list[dict[str, Any]] = field(default_factory=list)
    """Of each source with bad rows: its name, all its rows, and which of them were left out and why."""

    def leave_out(self, *sources: Rows | None) -> None:
        """Say which rows of `sources` are not among the samples."""
        for source in sources:
            if source is not None and source.left_out.whys:
                self.notes.append(source.left_out.note())
                self.left_out.append(source.left_out.to_dict())


class Metrics(Protocol):
    """Sums on the device, over all micro-batches of one evaluation and all ranks."""

    def update(self, outputs: Any, targets: torch.Tensor, summed_loss: torch.Tensor, count: int | torch.Tensor) -> None:
        """Add a micro-batch: the model's outputs, and what `Task.loss` takes and gives. Waits for no device."""

    def compute(self) -> dict[str, float]:
        """The figures by name, without "eval_"; all ranks call it, one transfer."""


class Task:
    """One kind of training. Methods are pure but for the caches that `prepare` writes."""

    kind: ClassVar[str]
    default_metric: ClassVar[str]
    rising: ClassVar[dict[str, bool]]
    """Each metric, and whether a greater one is better."""

    def greater_is_better(self, name: str) -> bool:
        """Of a metric, with or without "eval_". Raises InputError where the task has no such metric."""
        short = name.removeprefix("eval_")
        if short not in self.rising:
            known = [f"eval_{known}" for known in self.rising]
            raise InputError(
                f"training.metric_for_best_model: {self.kind} has no metric {name!r}.{nearest(name, known)} "
                f"It has: {listing(known)}"
            )
        return self.rising[short]

    def prepare(self, job: Job, config: PretrainedConfig, cache: Path, seed: int, max_positions: int | None = None) -> Prepared:
        """Read, check and tokenise the job's data, or find it under `cache`.

        `max_positions` is the longest input in tokens that the model takes (ModelFacts has it), None for no limit; `seed`
        decides the split of data.eval_fraction. Raises DataError for the data, InputError for the job.
        """
        raise NotImplementedError

    def loss(self, outputs: Any, targets: torch.Tensor) -> tuple[torch.Tensor, int | torch.Tensor]:
        """(summed loss, a float32 scalar; number of labels in the sum) of a micro-batch, from its logits; pure."""
        raise NotImplementedError

    def metrics(self, prepared: Prepared, device: torch.device | str) -> Metrics:
        raise NotImplementedError

    def head_config(self, prepared: Prepared) -> dict[str, Any]:
        """What the model's config must say of the head."""
        return {}

    def load_model(self, job: Job, config: PretrainedConfig, prepared: Prepared, model_kwargs: dict[str, Any]) -> torch.nn.Module:
        """The model with trained weights, or with random ones from torch's generator, which the caller seeds.

        float32 unless `model_kwargs` has a dtype. `config` is left as it is. Raises InputError where weights are missing,
        tokens have no embedding, or the loss of the model has no exact count.
        """
        import transformers

        refuse_router(config, job)
        config = copy.deepcopy(config)
        heads = getattr(config, "num_labels", None)
        for key, value in self.head_config(prepared).items():
            setattr(config, key, value)
        for part in (config, config.get_text_config()):
            if hasattr(part, "use_cache"):
                part.use_cache = False
        model = (
            self._random(job, config, prepared, model_kwargs)
            if job.model.name is None
            else load_weights(
                getattr(transformers, AUTO_CLASSES[self.kind]),
                job.model.name,
                job.model.revision,
                config,
                new_head=heads != getattr(config, "num_labels", None),
                **model_kwargs,
            )
        )
        tokenizer = prepared.tokenizer
        rows = model.get_input_embeddings().num_embeddings
        check_vocabulary(tokenizer, rows)
        largest = max(store.meta["largest_id"] for store in (prepared.train, prepared.eval) if store is not None)
        if largest >= rows:
            raise InputError(f"model.tokenizer: makes token {largest:,}, the model has embeddings for {rows:,} only")
        if tokenizer.pad_token_id >= rows:
            model.resize_token_embeddings(len(tokenizer), mean_resizing=False)  # the padding's embedding is never looked at
        _each(model.config, pad_token_id=tokenizer.pad_token_id)
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.pad_token_id = tokenizer.pad_token_id
        refuse_inexact(model, job)
        return cast("torch.nn.Module", model)

    def _random(self, job: Job, config: PretrainedConfig, prepared: Prepared, model_kwargs: dict[str, Any]) -> Any:
        import transformers

        tokenizer = prepared.tokenizer
        if job_vocab_size(job) is None:
            config.get_text_config().vocab_size = len(tokenizer)
        # an embedding's padding row is fixed at zero without a gradient: only a token that is nothing else may have it
        apart = tokenizer.pad_token_id not in (tokenizer.eos_token_id, tokenizer.unk_token_id)
        _each(
            config,
            pad_token_id=tokenizer.pad_token_id if apart else None,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
        auto = getattr(transformers, AUTO_CLASSES[self.kind])
        try:
            return auto.from_config(config, **in_float32(model_kwargs))
        except (ValueError, AssertionError) as error:
            raise InputError(f"model.config: {config.model_type} cannot be built from it: {truncate(str(error), 200)}") from error


def in_float32(model_kwargs: dict[str, Any]) -> dict[str, Any]:
    """`model_kwargs` for a model that no file holds, whose dtype "auto" would ask for."""
    import torch

    dtype = model_kwargs.get("dtype", "auto")
    return {**model_kwargs, "dtype": torch.float32 if dtype == "auto" else dtype}


def refuse_inexact(model: torch.nn.Module, job: Job) -> None:
    """Raises InputError for a model whose loss is no sum over samples: cutting a step batch would change the training."""
    from torch.nn.modules.batchnorm import _BatchNorm

    refuse_router(getattr(model, "config", None), job)
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            raise InputError(
                f"model: {name} is a {type(module).__name__}: its statistics depend on how a step batch is cut, so that "
                "micro-batches do not add up; choose a model without batch normalisation"
            )


def refuse_router(config: PretrainedConfig | None, job: Job) -> None:
    """Raises InputError for a mixture of experts, unless the job does without its load-balancing loss."""
    if config is None or job.task.ignore_router_loss:
        return
    text = config.get_text_config()
    given = [getattr(text, key, None) for key in ("num_local_experts", "num_experts", "n_routed_experts")]
    experts = max((int(number) for number in given if isinstance(number, int)), default=0)
    if experts > 1 or (experts == 0 and getattr(text, "router_aux_loss_coef", None)):
        raise InputError(
            f"model: {config.model_type} is a mixture of {experts or 'several'} experts: its load-balancing loss has no exact "
            "count over micro-batches; set task.ignore_router_loss = true to train without it, or choose a dense model"
        )


def _each(config: PretrainedConfig, **values: Any) -> None:
    """Set `values` in a config and in the one of its text model, which may be another."""
    for part in (config, config.get_text_config()):
        for key, value in values.items():
            setattr(part, key, value)
