"""The model of a task: loaded or with random weights, with the task's head, and fitted to the data."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

from hwopt.config.job import Job
from hwopt.config.task_kinds import TaskFacts
from hwopt.data.tokenizer import check_vocabulary
from hwopt.data.tokenizer_training import drop_special_tokens, job_vocab_size
from hwopt.errors import InputError
from hwopt.model.weights import load_weights
from hwopt.tasks.prepared import Prepared
from hwopt.text import truncate

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig


class ModelBuilder:
    facts: ClassVar[TaskFacts]
    problem_type: ClassVar[str | None] = None  # of the head, in the words of transformers

    def head_config(self, prepared: Prepared) -> dict[str, Any]:
        """Keys of the model's config that set up the head: the names of the labels, and the problem type."""
        kind = {} if self.problem_type is None else {"problem_type": self.problem_type}
        names = prepared.label_names
        if not names:
            return kind
        return kind | {"id2label": dict(enumerate(names)), "label2id": {name: number for number, name in enumerate(names)}}

    def load_model(self, job: Job, config: PretrainedConfig, prepared: Prepared, model_kwargs: dict[str, Any]) -> torch.nn.Module:
        """The model with trained weights, or with random weights from torch's generator, which the caller seeds.

        In float32 unless `model_kwargs` has a dtype. `config` is not changed. Raises InputError if weights are missing, if tokens
        have no embedding, or if the loss of the model has no exact count.
        """
        import transformers

        num_labels = getattr(config, "num_labels", None)
        config = with_head(config, self, prepared)
        for part in (config, config.get_text_config()):
            if hasattr(part, "use_cache"):
                part.use_cache = False
        model = (
            self._random_model(job, config, prepared, model_kwargs)
            if job.model.name is None
            else load_weights(
                getattr(transformers, self.facts.auto_class),
                job.model.name,
                job.model.revision,
                config,
                new_head=num_labels != getattr(config, "num_labels", None),
                **model_kwargs,
            )
        )
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.use_cache = True  # of a new model it is that of `config`
        self.fit_model(model, prepared)
        refuse_batch_statistics(model)
        return cast("torch.nn.Module", model)

    def fit_model(self, model: Any, prepared: Prepared) -> None:
        """Check that `model` can embed the tokens of the data; set its padding token and the ends of a text. Raises InputError.

        New tokens get the mean of the other embeddings; their numbers are `model.new_tokens`.
        """
        tokenizer = prepared.tokenizer
        rows = model.get_input_embeddings().num_embeddings
        check_vocabulary(tokenizer, rows)
        if prepared.chat_tokens.new:
            embed_new_tokens(model, prepared.chat_tokens.new)
            rows = model.get_input_embeddings().num_embeddings
        largest = max(store.meta["largest_id"] for store in prepared.stores)
        if largest >= rows:
            raise InputError(f"model.tokenizer: yields token {largest:,}, but the model has {rows:,} embeddings")
        if tokenizer.pad_token_id >= rows:
            model.resize_token_embeddings(len(tokenizer), mean_resizing=False)  # padding is never attended to
        set_in_configs(model.config, pad_token_id=tokenizer.pad_token_id)
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.pad_token_id = tokenizer.pad_token_id
            if prepared.chat_tokens.ends:
                own = model.generation_config.eos_token_id
                ends = {*prepared.chat_tokens.ends, tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])} - {None}
                model.generation_config.eos_token_id = sorted(ends)

    def _random_model(self, job: Job, config: PretrainedConfig, prepared: Prepared, model_kwargs: dict[str, Any]) -> Any:
        import transformers

        if getattr(config, "is_encoder_decoder", False) and self.facts.target == "sample":
            raise InputError(
                f"model.config: {self.facts.kind} trains an encoder-decoder ({config.model_type}) from trained weights only, "
                "whose config names the tokens between which it reads. Give model.name, or choose an encoder"
            )
        self.fit_config(config, job, prepared)
        auto_class = getattr(transformers, self.facts.auto_class)
        try:
            return auto_class.from_config(config, **in_float32(model_kwargs))
        except (ValueError, AssertionError) as error:
            raise InputError(f"model.config: cannot build {config.model_type} from it: {truncate(str(error), 200)}") from error

    def fit_config(self, config: PretrainedConfig, job: Job, prepared: Prepared) -> None:
        """Set the vocabulary of the job or the tokenizer in the `config` of a model with random weights."""
        tokenizer = prepared.tokenizer
        if job_vocab_size(job) is None:
            config.get_text_config().vocab_size = len(tokenizer)
        drop_special_tokens(config)
        # the padding row of an embedding is always zero, so the padding token must have no other role
        only_padding = tokenizer.pad_token_id not in (tokenizer.eos_token_id, tokenizer.unk_token_id)
        set_in_configs(
            config,
            pad_token_id=tokenizer.pad_token_id if only_padding else None,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )


def embed_new_tokens(model: Any, tokens: Sequence[int]) -> None:
    """Give `model` embeddings for `tokens`, also in its output layer: the mean of the rows that it has, as it loads no others."""
    import torch

    rows = min(tokens)
    if max(tokens) >= model.get_input_embeddings().num_embeddings:
        model.resize_token_embeddings(max(tokens) + 1, mean_resizing=False)
    with torch.no_grad():
        for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
            if layer is not None:
                layer.weight[list(tokens)] = layer.weight[:rows].mean(0, dtype=torch.float32).to(layer.weight.dtype)
    model.new_tokens = tuple(tokens)


def with_head(config: PretrainedConfig, task: ModelBuilder, prepared: Prepared) -> PretrainedConfig:
    """A copy of `config` with the head of `task` for the labels of `prepared`."""
    config = copy.deepcopy(config)
    for key, value in task.head_config(prepared).items():
        setattr(config, key, value)
    return config


def in_float32(model_kwargs: dict[str, Any]) -> dict[str, Any]:
    """`model_kwargs` with float32 in place of the dtype "auto", which needs saved weights."""
    import torch

    dtype = model_kwargs.get("dtype", "auto")
    return {**model_kwargs, "dtype": torch.float32 if dtype == "auto" else dtype}


def set_in_configs(config: PretrainedConfig, **values: Any) -> None:
    for part in (config, config.get_text_config()):
        for key, value in values.items():
            setattr(part, key, value)


def refuse_batch_statistics(model: torch.nn.Module) -> None:
    """Raise InputError for a model with batch normalisation: splitting a step batch would change the training."""
    from torch.nn.modules.batchnorm import _BatchNorm

    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            raise InputError(
                f"model: {name} is a {type(module).__name__}, whose statistics depend on the split into micro-batches. "
                "Choose a model without batch normalisation"
            )
