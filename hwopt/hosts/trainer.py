"""`optimized`: a plan in transformers' Trainer and the trainers of TRL, with the same constructor and the same train().

A step's batches are computed at once in its last call of `training_step`: in micro-batches by length if the loss is known to be a
sum over samples (`hwopt.hosts.additivity`).
"""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import ceil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from accelerate.data_loader import DataLoaderShard
from accelerate.utils import broadcast_object_list
from transformers import Trainer, TrainerCallback, TrainingArguments

from hwopt.errors import DoesNotFitError, InputError
from hwopt.hardware.cuda_memory import release_unused_memory
from hwopt.hardware.monitor import peak_memory_gib
from hwopt.hosts.additivity import refuse_other_laws
from hwopt.hosts.apply import compute_loss_of_plan
from hwopt.hosts.arguments import apply_plan, script_of
from hwopt.hosts.limits import check_states, lacks_of, refuse_half_weights, refuse_old_versions, refuse_prepared
from hwopt.hosts.script_plan import Script, ScriptPlan, described_model, plan_for
from hwopt.hosts.script_run import Loader, ScriptRun
from hwopt.hosts.trainer_step import TrainerStep
from hwopt.planning.plan import Plan
from hwopt.training.listener import DONE, Listener
from hwopt.training.optimizer import state_defaults


def optimized(
    trainer_class: type,
    profile: str = "auto",
    *,
    additive: str | None = None,
    strict: bool = False,
    listener: Listener | None = None,
    **plugins: Any,
) -> Any:
    """A subclass of `trainer_class` (Trainer, SFTTrainer …) that trains with the plan of `profile`. Same constructor.

    `additive` says how the loss of a step adds up from its rows, for losses that hwopt does not know: "rows" (a mean over
    rows), "labels" (a mean over labels that are not -100) or "sum". `plugins`: plugin -> its options, or False to leave it
    out. With `strict`, an error for each plugin that is not applied as asked. What the script sets itself wins. `listener`
    hears of the training, on the first rank.
    Raises InputError if `trainer_class` is not a subclass of transformers.Trainer, or has a plan already.
    """
    if not (isinstance(trainer_class, type) and issubclass(trainer_class, Trainer)):
        raise InputError(f"optimized() takes a subclass of transformers.Trainer, got {trainer_class!r}")
    if issubclass(trainer_class, OptimizedTrainer):
        raise InputError(f"{trainer_class.__name__} has a plan already: call optimized() once")
    refuse_other_laws(additive)
    if wrong := sorted(plugins.keys() & inspect.signature(trainer_class).parameters.keys()):
        call = f"optimized({trainer_class.__name__}, profile)({wrong[0]}=…)"
        raise InputError(f"{wrong[0]} is an argument of {trainer_class.__name__}, not of optimized(): {call}")
    refuse_old_versions()
    own = {"profile": profile, "additive": additive, "strict": strict, "listener": listener or Listener(), "plugins": plugins}
    members = {"_settings": SimpleNamespace(**own), "__module__": trainer_class.__module__, "__doc__": trainer_class.__doc__}
    return type(trainer_class.__name__, (OptimizedTrainer, trainer_class), members)


def given_by_name(classes: Sequence[type], positional: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call of the first class's constructor, by name; *args and **kwargs belong to the class below it."""
    signature = inspect.signature(classes[0].__init__)  # type: ignore[misc]
    names = {parameter.kind.name: name for name, parameter in signature.parameters.items()}
    found = dict(signature.bind(None, *positional, **named).arguments)
    del found[next(iter(signature.parameters))]  # self
    rest, more = found.pop(names.get("VAR_POSITIONAL", ""), ()), found.pop(names.get("VAR_KEYWORD", ""), {})
    return found | (given_by_name(classes[1:], rest, more) if rest or more else {})


Base: Any = object  # `optimized` adds the class of transformers or TRL


class OptimizedTrainer(Base):
    """In front of a Trainer class: overrides hooks that Trainer documents for subclasses, and calls each of them."""

    _settings: Any
    _rows_at_once: int | None = None  # `mini_batch_size` of a loss of sentence-transformers, from the forecast
    args: Any
    model: Any
    optimizer: Any

    def __init__(self, *positional: Any, **named: Any) -> None:
        parents = type(self).__mro__[type(self).__mro__.index(OptimizedTrainer) + 1 :]
        given, settings = given_by_name(parents, positional, named), self._settings
        self._own_args = given.get("args") or default_arguments(type(self), given.get("model"))
        if not isinstance(self._own_args, TrainingArguments):
            raise InputError(f"args: expected TrainingArguments or a class of TRL, got {type(self._own_args).__name__}")
        self._args_seen = dict(vars(self._own_args))
        args = copy.copy(self._own_args)
        model = given.get("model")
        if model is None and given.get("model_init") is None:
            raise InputError("optimized() needs model= or model_init=")
        refuse_prepared(model)
        script = script_of(args, lacks_of(type(self), args, given), given.get("train_dataset"))
        script = replace(script, adapter=given.get("peft_config") is not None, on_cpu=args.device.type == "cpu")
        described = described_model(model, given)
        found, plan, memory = self._planned(script, described, {**given, "model": model if isinstance(model, str) else described})
        self._run = ScriptRun(plan, args.device, Path(args.output_dir), settings.listener, args.process_index)
        changed = apply_plan(found.plan, args, named=isinstance(model, str))
        given["args"] = args
        if adapter := found.plan.recipe.trainer.get("peft_config"):
            given["peft_config"] = adapter()
        if model is not None and not isinstance(model, str):
            if given.get("peft_config") is None:  # else the weights will be frozen, and the adapters' are fp32
                refuse_half_weights(model, found.plan)
            given["model"] = self._run.fitted(model)
        for line in (*found.lines(), *memory, *changed):
            self._run.say(line)
        super().__init__(**given)
        if isinstance(model, str) and given.get("peft_config") is None:  # the arguments may name a dtype
            refuse_half_weights(self.model, found.plan)
        self._bind(isinstance(model, str))

    def _planned(self, script: Script, described: Any, given: Mapping[str, Any]) -> tuple[ScriptPlan, Plan, list[str]]:
        """The plan, the same with its memory, and a line about that, for a GPU. The first rank makes the forecast for all.

        Plugins that the script leaves to the forecast are on if it does not fit without them.
        """
        settings, plugins, args = self._settings, self._settings.plugins, self._own_args
        planned = partial(plan_for, described, settings.profile, script, strict=settings.strict)
        found = planned(plugins)
        if found.plan.hardware.device_type != "cuda":
            return found, found.plan, []
        from hwopt.hosts.cached_loss import forecast_of_cached  # they import the tracer
        from hwopt.hosts.forecast import Fit, forecast_of_trainer

        fit = Fit(None, "")
        if args.process_index == 0:
            call = (type(self), args, given, settings.profile, plugins, found.plan.hardware)
            fit = forecast_of_cached(given, args, found.plan) or forecast_of_trainer(*call)
        if script.world_size > 1:
            fit = broadcast_object_list([replace(fit, plan=None)])[0]
        self._rows_at_once, line = fit.rows, f"memory: {fit}"
        if fit.needs:
            found = planned({**plugins, **dict.fromkeys(fit.needs, True)})
        if fit.fits is False:
            line += '. Start with fewer rows at once, batch={"train": 1}'
            line += "" if fit.needs else ', or with checkpointing={"layers": "all"}'
            if settings.strict:
                raise DoesNotFitError(f"strict: {line}")
            line += "; a step that runs out of memory is repeated in smaller parts where it may be split"
        return found, replace(found.plan, memory=fit.memory), [line]

    def _bind(self, named: bool) -> None:
        """Give the run the objects that the Trainer has made."""
        run, wanted, present = self._run, self._run.recipe.accelerator.get("mixed_precision"), self.accelerator.mixed_precision
        if wanted not in (None, present):
            raise InputError(
                f"the plan needs mixed_precision = {wanted!r}, and this process has an Accelerator with {present!r}: make the "
                "Trainer before other Accelerators, or set the precision there"
            )
        if named:
            self.model = self.model_wrapped = run.fitted(self.model)
        run.accelerator, run.inner_model, run.model = self.accelerator, self.model, self.model
        self.add_callback(callback_of(run, self))
        self._split = TrainerStep(self, run, super().compute_loss, self._settings.additive)

    # hooks of the Trainer

    def call_model_init(self, trial: Any = None) -> Any:
        return self._run.fitted(super().call_model_init(trial))

    def create_optimizer(self, model: Any = None) -> Any:
        recipe = self._run.recipe
        if self.optimizer is None and (recipe.optimizer is not None or len(recipe.optimizer_wraps)):
            module = self.model if model is None else model
            trained = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
            decays = set(self.get_decay_parameter_names(module))  # the Trainer's own groups
            args = self.args
            common = {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
            rates = {True: args.weight_decay, False: 0.0}
            groups = [{"params": [p for n, p in trained if (n in decays) is own], "weight_decay": rates[own]} for own in rates]
            words = self.get_optimizer_cls_and_kwargs(args, module)[1]
            groups = words.get("optimizer_dict", groups)  # sentence-transformers: with the weights of the loss
            # empty groups too: the script's checkpoints have as many
            optimizer = (recipe.optimizer or torch.optim.AdamW)([common | group for group in groups])
            state_defaults(optimizer, common)
            for wrap in recipe.optimizer_wraps:
                optimizer = wrap(optimizer, self._run)
            self.optimizer = optimizer
        return super().create_optimizer(model)

    def get_train_dataloader(self) -> Any:
        on_card, config = self._run.device.type == "cuda", self.accelerator.dataloader_config
        # Accelerate puts the batches of a stream on the card, to send them to other ranks
        alone = on_card and self._run.world_size == 1 and config.dispatch_batches is None
        with mock.patch.object(config, "dispatch_batches", False if alone else config.dispatch_batches):
            loader = super().get_train_dataloader()
        steps = None
        with suppress(TypeError):  # an IterableDataset has no length
            steps = ceil(len(loader) / self.args.gradient_accumulation_steps)
        self._run.train_loader = Loader(loader, steps)
        if on_card and isinstance(loader, DataLoaderShard):
            loader.device = None  # a step is split on the host, where lengths can be read without waiting for the device
        return loader

    def get_batch_samples(self, *positional: Any, **named: Any) -> Any:
        batches, count = super().get_batch_samples(*positional, **named)
        self._split.begin(list(batches), counted=count is not None)
        return batches, count

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        return self._split.loss(model, partial(super().training_step, model), inputs, num_items_in_batch)

    def prediction_step(self, *positional: Any, **named: Any) -> Any:
        try:
            return super().prediction_step(*positional, **named)
        except torch.OutOfMemoryError:
            if self._run.forward_backward is None or not self._run.forward_backward.free():
                raise
        release_unused_memory()
        return super().prediction_step(*positional, **named)

    def compute_loss(self, *positional: Any, **named: Any) -> Any:
        found = super().compute_loss(*positional, **named)
        weight = self._split.passes.weight
        if isinstance(weight, float) and weight == 1.0:
            return found
        return (found[0] * weight, *found[1:]) if isinstance(found, tuple) else found * weight

    def train(self, *positional: Any, **named: Any) -> Any:
        run = self._run
        self._take_over_arguments()
        run.error = None
        run.steps.clear()
        with run.process():
            try:
                return super().train(*positional, **named)
            except BaseException as error:
                run.error = error
                raise
            finally:
                run.stop_observing()
                if self._split.is_split and (line := run.token_line()):
                    run.say(line)
                run.forward_backward = None  # with what it keeps on the device
                run.listener.on_end(run, DONE if run.error is None else str(run.error) or type(run.error).__name__)

    def _take_over_arguments(self) -> None:
        """Set what the script changed in its arguments since the Trainer was made: it holds the same object otherwise."""
        before, self._args_seen = self._args_seen, dict(vars(self._own_args))
        for name, value in self._args_seen.items():
            if value is not before.get(name):
                setattr(self.args, name, value)

    def _save(self, *positional: Any, **named: Any) -> None:
        with mock.patch.object(self, "args", self._own_args):  # training_args.bin holds the user's own arguments
            super()._save(*positional, **named)


def default_arguments(trainer: type, model: Any) -> Any:
    """The arguments that `trainer` uses if it is given none: of TRL's class of the same name, or as the class itself says."""
    name, package = trainer.__name__.removesuffix("Trainer"), importlib.import_module(trainer.__module__.partition(".")[0])
    if isinstance(found := getattr(package, f"{name}Config", None), type) and issubclass(found, TrainingArguments):
        label = model if isinstance(model, str) else getattr(getattr(model, "config", None), "_name_or_path", "")
        return found(f"{label.rpartition('/')[2] or 'trainer'}-{name}")
    return getattr(trainer, "training_args_class", TrainingArguments)("tmp_trainer")  # sentence-transformers has its own


def callback_of(run: ScriptRun, trainer: Any) -> Any:
    """The callback that tells `run` where the Trainer is."""

    class Steps(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
            run.model, run.inner_model = objects["model"], trainer.accelerator.unwrap_model(trainer.model)
            run.adapt(run.inner_model)
            compute_loss_of_plan(run)
            run.scheduler, run.scaler, optimizer = objects.get("lr_scheduler"), trainer.accelerator.scaler, objects["optimizer"]
            run.optimizer = getattr(optimizer, "optimizer", optimizer)
            check_states(run, trainer)
            run.step, run.total_steps = state.global_step, state.max_steps
            run.listener.on_start(run)

        def on_step_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
            run.begin_step()

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
            run.end_step(trainer.accelerator.optimizer_step_was_skipped)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **objects: Any) -> None:
            if "train_loss" in logs:  # only the last line has it; with include_num_input_tokens_seen all have train_runtime
                run.listener.on_finish(run, {"step": state.global_step, **logs, "peak_memory_gib": peak_memory_gib(run.device)})
            else:
                run.listener.on_log(run, {"step": state.global_step, **logs})

    return Steps()
