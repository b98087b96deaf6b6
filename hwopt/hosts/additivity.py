"""How the loss of a step adds up from its micro-batches: only for losses on a closed list, which the tests verify.

A wrong answer would train something else without a word, so that everything that is not on the list is not split: losses
over pairs of rows, batch statistics, noise that depends on the padded width, losses of other people's classes. Whoever
knows better says it (`additive`).
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from hwopt.errors import InputError
from hwopt.text import listing

if TYPE_CHECKING:
    from transformers import Trainer

Law = Literal["sum", "rows", "labels"]
"""sum: the loss of a micro-batch is divided by the step's count already. rows, labels: it is a mean over these."""
LAWS: tuple[Law, ...] = get_args(Law)


@dataclass(frozen=True)
class Additivity:
    law: Law | None
    reason: str
    """What the law is known from, or why the loss cannot be split."""


MEANS: dict[str, Law] = {
    "ForSequenceClassification": "rows",
    "ForImageClassification": "rows",
    "ForMultipleChoice": "rows",
    "ForTokenClassification": "labels",
    "ForMaskedLM": "labels",
    "ForConditionalGeneration": "labels",
}
"""End of a class of transformers -> what its loss is a mean over if it takes no count. The last one: encoder-decoders only."""
COUNTED = (
    "ForCausalLM",
    "LMHeadModel",
    "ForConditionalGeneration",
    "ForMaskedLM",
    "ForTokenClassification",
    "ForImageClassification",
)
"""Heads whose loss is divided by `num_items_in_batch` if `self.loss_function` computes it with `**kwargs`."""
TRAINERS = ("transformers.trainer.Trainer", "transformers.trainer_seq2seq.Seq2SeqTrainer", "trl.trainer.sft_trainer.SFTTrainer")
"""Classes whose `compute_loss` returns the model's loss."""
STEP = ("training_step", "get_batch_samples", "_inner_training_loop")
"""Methods of a Trainer that a step is made of."""
TRL_LOSSES = ("nll",)
"""Values of SFTConfig.loss_type for which `compute_loss` returns the model's loss."""


def additivity_of(trainer: Trainer, counted: bool, given: str | None = None) -> Additivity:
    """The law of `trainer`'s loss. `counted`: it passes `num_items_in_batch` to the model. `given`: what the user says."""
    if given is not None:
        if given not in LAWS:
            raise InputError(f"additive = {given!r}: expected one of {listing(LAWS)}")
        return Additivity(given, "as you say")
    model = inner(trainer.model)
    problem = trainer_problem(trainer) or batch_problem(trainer, model)
    if problem:
        return Additivity(None, problem)
    name = type(model).__name__
    if not type(model).__module__.startswith("transformers.models."):
        return Additivity(None, f"{name} is not a model of transformers")
    if counted and passes_count(type(model)):
        law: Law | None = "sum" if name.endswith(COUNTED) else None
    elif name.endswith("ForConditionalGeneration") and not model.config.is_encoder_decoder:
        law = None
    else:
        law = next((law for end, law in MEANS.items() if name.endswith(end)), None)
    if law is None:
        return Additivity(None, f"the loss of {name} is not on the list of losses that are known to be sums over samples")
    how = "divided by the labels of the step" if law == "sum" else f"a mean over the {law}"
    return Additivity(law, f"the loss of {name} is {how}")


def passes_count(model: Any) -> bool:
    """Whether the class of transformers gives what `forward` is called with, such as `num_items_in_batch`, to its loss."""
    _, called, rest = inspect.getsource(model.forward).partition("self.loss_function(")
    return bool(called) and "**kwargs" in rest.partition("\n\n")[0]


def trainer_problem(trainer: Trainer) -> str:
    """Why what `trainer` adds to the model's loss cannot be split; "" if it adds nothing."""
    for cls in type(trainer).__mro__:
        name = f"{cls.__module__}.{cls.__qualname__}"
        if name in TRAINERS or cls.__module__.startswith("hwopt.hosts"):
            continue
        if "compute_loss" in vars(cls):
            return f"{cls.__name__} computes a loss of its own"
        if own := [method for method in STEP if method in vars(cls)]:
            return f"{cls.__name__} has its own {own[0]}()"
    args: Any = trainer.args
    if trainer.compute_loss_func is not None:
        return "compute_loss_func is yours"
    if trainer.label_smoother is not None:
        return "label_smoothing_factor divides by all tokens of a batch, the padding included"
    if getattr(args, "loss_type", "nll") not in TRL_LOSSES:
        return f"loss_type = {args.loss_type!r}"
    return ""


def batch_problem(trainer: Trainer, model: Any) -> str:
    """Why a row's part of the loss depends on the other rows of its batch; "" if it does not."""
    import torch

    args: Any = trainer.args
    if getattr(args, "neftune_noise_alpha", None):
        return "the noise of NEFTune depends on the padded width"
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            return f"{name} is a BatchNorm: its statistics are those of the batch"
    text = model.config.get_text_config() if hasattr(model, "config") else None
    if getattr(text, "output_router_logits", False):
        return "the load-balancing loss of the router is not a sum over samples"
    if getattr(args, "padding_free", False) or getattr(args, "packing", False):
        return "packed rows are one row of the batch"
    return ""


def shifts_labels(model: Any) -> bool:
    """Whether the loss of `model` compares the output of each token with the label of the next one."""
    model = inner(model)
    decoder = not getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return decoder and type(model).__name__.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"))


def inner(model: Any) -> Any:
    """The model of transformers inside wrappers of peft and of torch."""
    while True:
        below = getattr(model, "module", None)
        if below is None and hasattr(model, "get_base_model"):
            below = model.get_base_model()
        if below is None or below is model:
            return model
        model = below
