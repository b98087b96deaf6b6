"""What a loop that is not hwopt's has no place for, and the scripts that a plan refuses."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import requires, version
from typing import Any

import torch

from hwopt.config.aliases import plugin_of
from hwopt.errors import InputError
from hwopt.planning.decisions import PluginDecision
from hwopt.planning.parts import HostSets
from hwopt.plugin import Context

TRAINER_LACKS: dict[str, str] = {
    "training": HostSets("the hyperparameters, warmup among them, are those of your arguments"),
    "schedule": HostSets("the learning rates are those of your arguments"),
    "parameter_groups": HostSets("which weights decay, and how fast each learns, is your Trainer's"),
    "order": "your Trainer's sampler orders the rows; set train_sampling_strategy = 'group_by_length' in your arguments",
    "collate": "your collator makes the batches",
    "masters": "your Trainer clips the gradients of the weights that it knows, not of fp32 masters",
    "scaler": "Accelerate makes the loss scaler",
    "engine": "your Trainer owns the backward pass, clipping and the update",
    "state": "your Trainer's checkpoints have no place for it",
    "final_steps": "the model that is saved is yours",
    "events['on_gradients']": "your Trainer clips before anybody sees the gradients",
}
"""Field of the recipe, or key, that a Trainer has no place for -> why the plugin that writes it is skipped."""
SCRIPT_LACKS = {
    **{field: type(why)(re.sub("your (Trainer|arguments)", "your script", why)) for field, why in TRAINER_LACKS.items()},
    "loss": "your script computes the loss from the model's logits",
    "trainer": "the model that is saved is yours; pass a prepared model",
    "forward_backward": "your script owns the forward and the backward pass",
    "prepared_steps": "your loop calls the model with batches of any width",
    "batch['widths']": "your collator pads the batches",
    "loader": "your script makes the DataLoader",
    "order": "your script's sampler orders the rows",
    "optimizer_wraps": "your script steps its own optimizer",
}
"""The same for an Accelerate script and a loop of the user's own."""
OWN_PARTS_LACK = {
    "loss": "the loss is yours",
    "collate": "your collate_fn makes the batches",
    "batch['widths']": "your collate_fn pads the batches",
    "final_steps": "the model that is saved is yours",
    "trainer": "the model that is saved is yours",
}
"""The same for a user's own module in hwopt's loop."""
STEP_FIELDS = ("cut", "batch['train']", "batch['widths']", "forward_backward")  # what splits a step, and computes its parts
ENGINE_FIELDS: tuple[str, ...] = (*STEP_FIELDS, "accelerator['mixed_precision']", "model_steps", "prepared_steps")
ENGINE_FIELDS += ("optimizer", "optimizer_wraps", "loss", "trainer")
"""What DeepSpeed, FSDP and Megatron do themselves."""
NOT_ADDITIVE = 'hwopt does not know how the loss adds up from its rows; say additive="rows", "labels" or "sum"'
WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "DeepSpeedEngine", "OptimizedModule", "DataParallel")
GENERATING = ("GRPOTrainer", "RLOOTrainer", "OnlineDPOTrainer")  # Trainers of TRL that make the samples of a step themselves
MODULES = ("torch", "transformers", "peft", "bitsandbytes", "accelerate", "hwopt", "hwopt_plugins")
"""Packages whose modules and hooks keep no state on the host in a forward pass."""
LIBRARIES = ("transformers", "trl", "sentence_transformers", "hwopt")
"""Packages whose Trainers take their loader and optimizer from the arguments."""
OWN_OPTIMIZER = ("create_optimizer", "create_optimizer_and_scheduler", "get_optimizer_cls_and_kwargs")
OWN_LOADER = ("get_train_dataloader", "_get_dataloader")
LOADED = "the model is loaded already; pass its name to a trainer of TRL, or peft_config, or a prepared model"
LOADING = ("peft_config", "quantization_config")
OPTIMIZER_ARGUMENTS = ("optim_args", "optim_target_modules", "learning_rate_mapping")
"""Arguments that only the optimizer of the Trainer reads."""


def lacks_of(trainer: type, args: Any, given: Mapping[str, Any]) -> dict[str, str]:
    """`TRAINER_LACKS`, and what this Trainer class, its arguments and its constructor call (`given`) do themselves."""
    found = TRAINER_LACKS | loading_lacks(trainer, args, given)
    if word := engine_of(args):
        found |= engine_lacks(f"{word} of your arguments")
    optimizer = ""
    if given.get("optimizers") not in (None, (None, None)) or given.get("optimizer_cls_and_kwargs") is not None:
        optimizer = "you pass an optimizer to the Trainer"
    elif word := next((word for word in OPTIMIZER_ARGUMENTS if getattr(args, word, None)), ""):
        optimizer = f"{word} of your arguments is for the Trainer's own optimizer"
    elif optimizer := overridden(trainer, OWN_OPTIMIZER):
        optimizer += " makes the optimizer"
    if optimizer:
        found |= dict.fromkeys(("optimizer", "optimizer_wraps"), optimizer)
    if loader := overridden(trainer, OWN_LOADER):
        found["loader"] = f"{loader} makes the DataLoader"
    if isinstance(given.get("train_dataset"), torch.utils.data.IterableDataset):
        found["loader"] = "workers may repeat rows of your IterableDataset, or change their order; set dataloader_num_workers"
    if passes := own_passes(trainer, args, given):
        found["forward_backward"] = passes
    if loss := own_loss(trainer, args, given):
        found["loss"] = loss
    if args.torch_compile:
        found["prepared_steps"] = HostSets("torch_compile = True of your arguments compiles the model")
    if any(cls.__name__ in GENERATING for cls in trainer.__mro__):
        found |= dict.fromkeys(STEP_FIELDS, "the trainer makes its rows inside the step")
    return found


def loading_lacks(trainer: type, args: Any, given: Mapping[str, Any]) -> dict[str, str]:
    """Which `recipe.trainer` this Trainer has no place for, and why: it loads no model, or the user passes the same."""
    takes = False
    for cls in trainer.__mro__:
        if "__init__" in vars(cls) and not cls.__module__.startswith("hwopt."):
            parameters = inspect.signature(cls.__init__).parameters  # type: ignore[misc]
            takes = "peft_config" in parameters
            if takes or all(each.kind is not each.VAR_KEYWORD for each in parameters.values()):
                break
    if not takes or not isinstance(given.get("model"), str) or not hasattr(args, "model_init_kwargs"):
        return {"trainer": LOADED}
    if any(cls.__name__ == "RewardTrainer" for cls in trainer.__mro__):
        return {"trainer": 'the head of a reward model is trained in full: pass peft_config with modules_to_save = ["score"]'}
    own = {**(args.model_init_kwargs or {}), **given}
    return {f"trainer[{word!r}]": HostSets(f"{word} is yours") for word in LOADING if own.get(word) is not None}


def own_loss(trainer: type, args: Any, given: Mapping[str, Any]) -> str:
    """Why the loss must be computed as the Trainer does it; "" if it may be computed without logits in training steps."""
    if args.use_liger_kernel:
        return "use_liger_kernel of your arguments chooses the kernels of the loss"
    if args.label_smoothing_factor:
        return "label_smoothing_factor of your arguments needs the logits"
    if given.get("compute_loss_func") is not None:
        return "compute_loss_func is yours, and may read the logits"
    if args.n_gpu > 1:
        return "DataParallel copies the model in each step"
    own = overridden(trainer, ("compute_loss",), ("transformers", "hwopt"))
    if own.startswith("SFTTrainer."):
        return HostSets("SFTTrainer computes its loss in tiles of the logits itself")
    return own and f"{own} computes the loss, and may read the logits"


def own_passes(trainer: type, args: Any, given: Mapping[str, Any]) -> str:
    """Why the passes of a micro-batch are the Trainer's alone: they do more than operators of the device; "" if they do not."""
    if args.world_size > 1 or args.n_gpu > 1:
        return "on several devices your Trainer's backward pass exchanges gradients"
    if args.torch_compile:
        return "torch_compile = True of your arguments compiles the passes"
    if given.get("compute_loss_func") is not None:
        return "compute_loss_func is yours, and may read values on the host"
    own = overridden(trainer, ("compute_loss", "training_step"), ("transformers", "hwopt"))
    return own and f"{own} may read values on the host, for its log"


def unknown_part(model: Any) -> str:
    """What in `model` may do more than operators of the device: a module outside of MODULES, or a hook; "" for nothing."""
    for name, module in model.named_modules():
        if not is_known(type(module)):
            return f"{name or 'the model'} is a {type(module).__name__} of yours"
        own = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
        if not all(is_known(hook) for hooks in own for hook in hooks.values()):
            return f"{name or 'the model'} has a hook of yours"
    return ""


def is_known(part: Any) -> bool:
    """Whether `part`, a class or a function, is of one of MODULES."""
    return getattr(part, "__module__", "").partition(".")[0] in MODULES


def engine_lacks(engine: str) -> dict[str, str]:
    """What a plan leaves to `engine`: field of the recipe -> why."""
    return dict.fromkeys(ENGINE_FIELDS, f"{engine} owns model, precision, optimizer and step")


def with_reason(entry: PluginDecision, context: Context, least: bool) -> PluginDecision:
    """`entry` with the reason of its options, if it left the choice to a forecast; `least`: it got those of the least memory."""
    if entry.choices > 1 and entry.decision == "apply":
        return replace(entry, reason=entry.plugin.probe(context).reason)
    off = entry.choices > 1 and not least
    return replace(entry, reason=f"your script does without it; {entry.name}=True switches it on") if off else entry


def engine_of(args: Any) -> str:
    """ "deepspeed" or "fsdp" if the arguments, or `accelerate launch`, ask for that engine; else ""."""
    for word in ("deepspeed", "fsdp"):
        if getattr(args, word, None) or os.environ.get(f"ACCELERATE_USE_{word.upper()}") == "true":
            return word
    return ""


def overridden(trainer: type, methods: tuple[str, ...], packages: tuple[str, ...] = LIBRARIES) -> str:
    """The first of `methods` that a class outside of `packages` defines for `trainer`, as "Class.method()"; else ""."""
    own = (cls for cls in trainer.__mro__ if cls.__module__.partition(".")[0] not in packages)
    return next((f"{cls.__name__}.{method}()" for cls in own for method in methods if method in vars(cls)), "")


def refuse_prepared(model: Any) -> None:
    """Raise InputError for a model that is inside a wrapper of torch, or compiled."""
    if type(model).__name__ in WRAPPERS:
        raise InputError(f"the model is wrapped in {type(model).__name__}: pass the model itself, and wrap it afterwards")
    if any(module._compiled_call_impl is not None for module in getattr(model, "modules", tuple)()):
        raise InputError("the model is compiled: pass it as it was before model.compile(), and compile it afterwards")


def refuse_half_weights(model: Any, plan: Any) -> None:
    """Raise InputError if the plan computes with autocast over fp32 weights, and `model` trains half-precision ones."""
    trained = {p.dtype for p in model.parameters() if p.requires_grad}
    halves = {str(dtype).removeprefix("torch.") for dtype in trained & {torch.float16, torch.bfloat16}}
    if halves and plan.recipe.model_kwargs.get("dtype") == "float32":
        pure = {"level": "pure", "dtype": "bf16" if "bfloat16" in halves else "fp16"}
        raise InputError(
            f"the model trains {' and '.join(sorted(halves))} weights, and the plan's precision needs float32 weights: small "
            f"updates would be lost. Load it with dtype=torch.float32, or say precision={pure} or precision=False"
        )


def check_states(run: Any, trainer: Any) -> None:
    """Raise InputError if a checkpoint has the states of another optimizer than the plan's; say if the script's has others."""
    if run.recipe.optimizer is None:
        return
    cls, theirs = type(run.optimizer), trainer.get_optimizer_cls_and_kwargs(trainer.args, run.inner_model)[0]
    ours, usual = (each.__module__.startswith("bitsandbytes") for each in (cls, theirs))  # its states have names of their own
    states = [each for each in run.optimizer.state.values() if each]
    if states and any("state1" in each for each in states) != ours:  # the first step would miss them
        leave_out = f"resume with {plugin_of('optim')}=False"
        raise InputError(f"the checkpoint has the states of another optimizer than {cls.__name__}: {leave_out}")
    if ours != usual:
        optim = getattr(trainer.args.optim, "value", trainer.args.optim)
        run.say(f"checkpoints hold the states of {cls.__name__}: your script resumes with that optim, not {optim!r}")


def refuse_old_versions() -> None:
    """Raise InputError for a transformers, accelerate or TRL that is older than the oldest one that hwopt is tested with."""
    from packaging.requirements import Requirement

    for requirement in map(Requirement, requires("hwopt") or ()):
        if requirement.name in ("transformers", "accelerate", "trl"):
            found, oldest = version(requirement.name), next(each for each in requirement.specifier if each.operator == ">=")
            if not oldest.contains(found, prereleases=True):
                raise InputError(f"{requirement.name} {found} is too old: hwopt needs {oldest}. Upgrade it")
