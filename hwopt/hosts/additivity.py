"""How the loss of a step adds up from its micro-batches: only for losses on a closed list, which the tests verify.

A wrong answer would train something else without a word, so a loss that is not on the list is not split unless the user says
how it adds up (`additive`).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from transformers import Trainer

from hwopt.errors import InputError
from hwopt.hosts.limits import engine_of
from hwopt.text import listing

Law = Literal["sum", "rows", "labels"]
"""sum: the loss of a micro-batch is divided by the step's count already. rows, labels: it is a mean over these."""
LAWS: tuple[Law, ...] = get_args(Law)


@dataclass(frozen=True)
class Additivity:
    law: Law | None
    reason: str  # what the law is known from, or why the loss cannot be split
    pairs: bool = False
    """Whether the first half of a batch holds chosen rows and the second half the rejected ones: what is split are pairs."""


MEANS: dict[str, Law] = dict.fromkeys(("ForSequenceClassification", "ForImageClassification", "ForMultipleChoice"), "rows")
MEANS |= dict.fromkeys(("ForTokenClassification", "ForMaskedLM", "ForConditionalGeneration"), "labels")
"""End of a class of transformers -> what its loss is a mean over if it takes no count. The last one: encoder-decoders only."""
COUNTED: tuple[str, ...] = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM")
COUNTED += ("ForTokenClassification", "ForImageClassification")
"""Heads whose loss is divided by `num_items_in_batch` if `self.loss_function` computes it with `**kwargs`."""
TRAINERS = ("transformers.trainer.Trainer", "transformers.trainer_seq2seq.Seq2SeqTrainer")
"""Classes whose `compute_loss` returns the model's loss."""
STEP = ("training_step", "get_batch_samples", "_inner_training_loop")  # methods of a Trainer that a step is made of
LOSS_METHOD = re.compile("loss|forward|logp|logit")
"""In the names of methods of TRL's trainers that a loss is computed by, such as _compute_loss and concatenated_forward."""
PAIR_LOSSES = {"sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "apo_zero", "apo_down"}
PAIR_LOSSES |= {"discopop", "sigmoid_norm"}
"""Values of DPOConfig.loss_type that are a mean over pairs. "sft" is a mean over tokens; "aot" sorts the pairs of a batch."""


def refuse_other_laws(additive: str | None) -> None:
    """Raise InputError unless `additive` is a law, or None."""
    if additive not in (None, *LAWS):
        raise InputError(f"additive = {additive!r}: expected one of {listing(LAWS)}")


def sft(trainer: Any, counted: bool) -> Additivity:
    name = f"the loss of SFTTrainer, loss_type = {trainer.args.loss_type!r}, is"
    if trainer.args.loss_type not in ("nll", "dft"):
        return Additivity(None, f"loss_type = {trainer.args.loss_type!r}")
    return Additivity("sum", f"{name} divided by the labels of the step") if counted else Additivity("labels", f"{name} a mean")


def dpo(trainer: Any, counted: bool) -> Additivity:
    if other := [name for name in trainer.loss_types if name not in PAIR_LOSSES]:
        return Additivity(None, f"loss_type = {other[0]!r} of DPOTrainer is not a mean over pairs")
    return Additivity("rows", f"the loss of DPOTrainer, {listing(trainer.loss_types)}, is a mean over pairs", pairs=True)


WIDTH_ROPE = {"dynamic", "longrope"}
"""Kinds of rotary positions whose frequencies change for the whole batch if its longest row exceeds the original context."""
MIXING = {"nllb-moe": "let an expert take a limited number of the tokens of a batch"} | dict.fromkeys(
    ("canine", "convbert", "fnet", "mobilebert", "mra", "nystromformer", "reformer", "yoso"), "mix tokens with the padding"
)
"""Kind of a model -> what its layers do, for which the loss of a row changes with the other rows, or with the padding."""
GRAPH_MODES = ("reduce-overhead", "max-autotune")  # modes of torch.compile that record CUDA graphs
REWARD = Additivity("rows", "the loss of RewardTrainer is a mean over pairs", pairs=True)
TRL: dict[str, Callable[[Any, bool], Additivity]] = {
    "trl.trainer.sft_trainer.SFTTrainer": sft,
    "trl.trainer.dpo_trainer.DPOTrainer": dpo,
    "trl.trainer.reward_trainer.RewardTrainer": lambda *_: REWARD,
}
"""Class of TRL that computes a loss of its own -> its law. Not here: KTO (a KL term over the batch), ORPO, CPO, GRPO, RLOO."""


def additivity_of(trainer: Trainer, counted: bool, given: Law | None = None) -> Additivity:
    """The law of `trainer`'s loss. `counted`: it passes `num_items_in_batch` to the model. `given`: what the user says."""
    if engine := engine_of(trainer.args):
        return Additivity(None, f"{engine} of your arguments owns the step")
    if (mode := trainer.args.torch_compile_mode) in GRAPH_MODES and trainer.args.device.type == "cuda":
        return Additivity(None, f"torch_compile_mode = {mode!r} records CUDA graphs, which the next micro-batch overwrites")
    model = inner(trainer.model)
    if problem := front_problem(trainer) or rows_meet(model, trainer.args):
        return Additivity(None, problem)
    if given is not None:
        return Additivity(given, "as you say")
    if problem := trainer_problem(trainer) or batch_problem(trainer, model):
        return Additivity(None, problem)
    if law_of := next((TRL[name] for name in map(full_name, type(trainer).__mro__) if name in TRL), None):
        return law_of(trainer, counted)
    name = type(model).__name__
    if not type(model).__module__.startswith("transformers.models."):
        return Additivity(None, f"{name} is not a model of transformers")
    if counted and gives_words_to_loss(model):
        law: Law | None = "sum" if name.endswith(COUNTED) else None
    elif name.endswith("ForConditionalGeneration") and not model.config.is_encoder_decoder:
        law = None
    else:
        law = next((law for end, law in MEANS.items() if name.endswith(end)), None)
    if law is None:
        return Additivity(None, f"the loss of {name} is not on the list of losses that are known to be sums over samples")
    how = "divided by the labels of the step" if law == "sum" else f"a mean over the {law}"
    return Additivity(law, f"the loss of {name} is {how}")


def gives_words_to_loss(model: Any) -> bool:
    """Whether the class gives what `forward` is called with, such as `num_items_in_batch`, to its loss function."""
    return "**kwargs" in inspect.getsource(type(model).forward).partition("self.loss_function(")[2].partition("\n\n")[0]


def front_problem(trainer: Trainer) -> str:
    """Why a class that was made of hwopt's cannot be split; "" if hwopt's is in front of all that compute the loss."""
    classes = type(trainer).__mro__
    front = next((number for number, cls in enumerate(classes) if cls.__module__.startswith("hwopt.hosts")), 0)
    for cls in classes[:front]:
        if own := [method for method in ("compute_loss", *STEP) if method in vars(cls)]:
            return f"{cls.__name__}.{own[0]}() is in front of hwopt: make the class first, then hwopt.optimized({cls.__name__})"
    return ""


def rows_meet(model: Any, args: Any = None) -> str:
    """Why every loss of this model depends on the other rows of its batch, whatever it is computed of; "" if none does."""
    if getattr(args, "neftune_noise_alpha", None):
        return "the noise of NEFTune depends on the padded width"
    if (kind := getattr(getattr(model, "config", None), "model_type", "")) in MIXING:
        return f"layers of {kind} {MIXING[kind]}"
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            return f"{name} is a BatchNorm: its statistics are those of the batch"
        # torch has two: a module of parametrizations, and a hook
        if any(type(each).__name__.endswith("SpectralNorm") for each in (module, *module._forward_pre_hooks.values())):
            return f"{name} is a spectral norm: each forward pass changes it"
    return ""


def trainer_problem(trainer: Trainer) -> str:
    """Why what `trainer` adds to the model's loss cannot be split; "" if it adds nothing."""
    for cls in type(trainer).__mro__:
        if full_name(cls) in TRL:
            break
        if full_name(cls) in TRAINERS or cls.__module__.startswith("hwopt.hosts"):
            continue
        if any(LOSS_METHOD.search(name) and hasattr(cls.__base__, name) for name in vars(cls)):
            return f"{cls.__name__} computes a loss of its own"
        if own := [method for method in STEP if method in vars(cls)]:
            return f"{cls.__name__} has its own {own[0]}()"
    args: Any = trainer.args
    if trainer.compute_loss_func is not None:
        return "compute_loss_func is yours"
    if trainer.label_smoother is not None:
        return "label_smoothing_factor divides by all tokens of a batch, the padding included"
    if args.use_liger_kernel and (args.liger_kernel_config or {}).get("fused_linear_cross_entropy", True):
        return "use_liger_kernel computes the loss"
    if args.n_gpu > 1:
        return f"DataParallel splits each batch over {args.n_gpu} devices; start one process for each with accelerate launch"
    return ""


def full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def class_name(model: Any) -> str:
    """The class of `model`, a module, or the one that its config names; "" for none."""
    return type(model).__name__ if hasattr(model, "parameters") else (getattr(model, "architectures", None) or [""])[0]


def batch_problem(trainer: Trainer, model: Any) -> str:
    """Why a row's part of the loss depends on the other rows of its batch; "" if it does not."""
    if own := replaced_part(model):
        return f"{own} of the model is yours"
    text = model.config.get_text_config() if hasattr(model, "config") else None
    if found := WIDTH_ROPE & set(rope_types(getattr(text, "rope_parameters", None))):
        return f"the positions of rope_type = {min(found)!r} depend on the longest row of the batch"
    if getattr(text, "attention_type", None) == "block_sparse":
        return "attention_type = 'block_sparse' depends on the width of the batch"
    if getattr(text, "output_router_logits", False) or getattr(trainer, "aux_loss_enabled", False):
        return "the load-balancing loss of the router is not a sum over samples"
    if getattr(trainer.args, "padding_free", False) or getattr(trainer.args, "packing", False):
        return "packed rows are one row of the batch"
    return ""


def replaced_part(model: Any) -> str:
    """The part of this model, apart from its class, that a script has replaced and that its loss depends on; "" for none."""
    own = vars(model)
    forward = next((own[name] for name in ("_old_forward", "_original_forward", "forward") if name in own), None)  # Accelerate's
    if forward is not None and not from_libraries(forward) and getattr(forward, "__func__", None) is not type(model).forward:
        return "forward()"
    if (loss := own.get("_loss_function")) is not None and not from_libraries(loss):
        return "loss_function"
    return "a forward hook" if own.get("_forward_hooks") else ""


def from_libraries(function: Any) -> bool:
    """Whether the code of `function` is a library's. `functools.wraps` gives a script's function their `__module__`."""
    owner = getattr(function, "__func__", function)
    where: str = getattr(owner, "__globals__", {"__name__": type(owner).__module__}).get("__name__", "")
    return where.partition(".")[0] in ("transformers", "trl", "peft", "hwopt")


def rope_types(parameters: Any) -> Iterator[str]:
    """The kinds of rotary positions in the `rope_parameters` of a config, which may have a table for each kind of layer."""
    if isinstance(parameters, Mapping):
        if isinstance(kind := parameters.get("rope_type"), str):
            yield kind
        for value in parameters.values():
            yield from rope_types(value)


def shifts_labels(model: Any) -> bool:
    """Whether the loss of `model` compares the output of each token with the label of the next one."""
    model = inner(model)
    decoder = not getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return decoder and type(model).__name__.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"))


def device_of(model: Any) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


@contextmanager
def without_dropout(model: Any) -> Iterator[None]:
    """`model` in evaluation mode inside, except its 4-bit layers: bitsandbytes changes their weights for inference on a CPU."""
    before = {module: module.training for module in model.modules()}
    for module in before:
        module.training = any(cls.__name__ == "Linear4bit" for cls in type(module).__mro__)
    try:
        yield
    finally:
        for module, training in before.items():
            module.training = training


def inner(model: Any) -> Any:
    """The model of transformers inside wrappers of peft and of torch."""
    below = getattr(model, "module", None)
    if below is None and hasattr(model, "get_base_model"):
        below = model.get_base_model()
    return model if below is None or below is model else inner(below)
