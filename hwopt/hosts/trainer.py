"""`optimized`: a plan in transformers' Trainer and the trainers of TRL, with the same constructor and the same train().

    trainer = hwopt.optimized(SFTTrainer, "auto")(model=..., args=..., train_dataset=...)

The user's arguments, loader, sampler and collator stay as they are. A step's batches are computed at once in its last call of
`training_step`: in micro-batches by length if the loss is known to be a sum over samples (`hwopt.hosts.additivity`).
"""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version
from math import ceil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from hwopt.data.batches.collate import cut_in_order
from hwopt.distributed.oom_backoff import OomBackoff
from hwopt.errors import DoesNotFitError, InputError
from hwopt.hardware.monitor import peak_memory_gib
from hwopt.hosts.additivity import Additivity, additivity_of, inner, shifts_labels
from hwopt.hosts.arguments import apply_plan, script_of
from hwopt.hosts.collated import Batch, MicroBatch, as_pairs, first_rows, labels_in, micro_batches, rows_of
from hwopt.hosts.script_plan import plan_for
from hwopt.hosts.script_run import Loader, ScriptRun, ScriptStep
from hwopt.text import first_line, listing
from hwopt.training.failure import last_resorts
from hwopt.training.listener import DONE, Listener
from hwopt.training.memory_pressure import free_memory

LACKS = {
    "training": "the hyperparameters are those of your arguments",
    "schedule": "the learning rates are those of your arguments",
    "parameter_groups": "which weights decay, and how fast each learns, is your Trainer's",
    "order": "your Trainer's sampler orders the rows; set train_sampling_strategy = 'group_by_length' in your arguments",
    "collate": "your collator makes the batches",
    "loss": "your Trainer computes the loss from the model's logits",
    "masters": "your Trainer clips the gradients of the weights that it knows, not of fp32 masters",
    "scaler": "Accelerate makes the loss scaler",
    "engine": "your Trainer owns the backward pass, clipping and the update",
    "state": "your Trainer's checkpoints have no place for it",
    "final_steps": "the model that is saved is yours; pass peft_config or a prepared model",
    "export_steps": "the model that is saved is yours",
    "events['on_gradients']": "your Trainer clips before anybody sees the gradients",
    "batch['widths']": "your collator pads the batches",
    "batch['eval']": "per_device_eval_batch_size is yours",
}
"""Field of the recipe, or key, that a Trainer has no place for -> why the plugin that writes it is skipped."""
HARMLESS = ("batch['eval']", "export_steps")
"""What a plugin may write although the host does not read it, because the plugin's other parts work without it."""
WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "DeepSpeedEngine", "OptimizedModule", "DataParallel")
PROBED_ROWS = 8
"""Rows of the first batch whose losses are compared with the loss of all of them."""
ROW_MEANS = ("rewards/", "logps/", "mean_reward", "accuracy", "margin")
"""What TRL logs as a mean over the rows of a batch: names begin so."""
GENERATING = ("GRPOTrainer", "RLOOTrainer", "OnlineDPOTrainer")
"""Trainers of TRL that make the samples of a step themselves."""


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
    from transformers import Trainer

    if not (isinstance(trainer_class, type) and issubclass(trainer_class, Trainer)):
        raise InputError(f"optimized() takes a subclass of transformers.Trainer, got {trainer_class!r}")
    if issubclass(trainer_class, OptimizedTrainer):
        raise InputError(f"{trainer_class.__name__} has a plan already: call optimized() once")
    refuse_old_versions()
    settings = SimpleNamespace(
        profile=profile, additive=additive, strict=strict, listener=listener or Listener(), plugins=plugins
    )
    members = {"_settings": settings, "__module__": trainer_class.__module__, "__doc__": trainer_class.__doc__}
    return type(trainer_class.__name__, (OptimizedTrainer, trainer_class), members)


class OptimizedTrainer:
    """In front of a Trainer class: overrides hooks that Trainer documents for subclasses, and calls each of them."""

    _settings: Any
    _weight = 1.0
    """What the loss of the present micro-batch is multiplied by."""

    def __init__(self, *positional: Any, **named: Any) -> None:
        bound = inspect.signature(super().__init__).bind(*positional, **named)
        given, settings = bound.arguments, self._settings
        self._own_args = given.get("args") or default_arguments(type(self), given.get("model"))
        args = copy.copy(self._own_args)
        model = given.get("model")
        if model is None and given.get("model_init") is None:
            raise InputError("optimized() needs model= or model_init=")
        refuse(model, args)
        script = script_of(args, self._lacks(given))
        found = plan_for(described_model(model, given), settings.profile, script, settings.plugins, settings.strict)
        self._run = ScriptRun(found.plan, args.device, Path(args.output_dir), settings.listener, args.process_index)
        changed = apply_plan(found.plan, args, named=isinstance(model, str))
        given["args"] = args
        if model is not None and not isinstance(model, str):
            refuse_half_weights(model, found.plan)
            given["model"] = self._run.fitted(model)
        for line in (*found.lines(), *changed):
            self._run.say(line)
        super().__init__(*bound.args, **bound.kwargs)
        self._bind(isinstance(model, str))

    def _lacks(self, given: Mapping[str, Any]) -> dict[str, str]:
        """`LACKS` and what the arguments of this constructor call add."""
        found = {field: why for field, why in LACKS.items() if field not in HARMLESS}
        if given.get("optimizers") not in (None, (None, None)) or given.get("optimizer_cls_and_kwargs") is not None:
            found |= dict.fromkeys(("optimizer", "optimizer_wraps"), "you pass an optimizer to the Trainer")
        if any(cls.__name__ in GENERATING for cls in type(self).__mro__):
            found |= dict.fromkeys(("cut", "batch['train']"), "the trainer makes its rows inside the step")
        return found

    def _bind(self, named: bool) -> None:
        """Give the run the objects that the Trainer has made."""
        run, trainer = self._run, self._trainer
        wanted = run.recipe.accelerator.get("mixed_precision", "no")
        if trainer.accelerator.mixed_precision != wanted:
            raise InputError(
                f"the plan needs mixed_precision = {wanted!r}, and this process has an Accelerator with "
                f"{trainer.accelerator.mixed_precision!r}: make the Trainer before other Accelerators, or set the precision there"
            )
        if named:
            trainer.model = run.fitted(trainer.model)
            trainer.model_wrapped = trainer.model
        run.accelerator = trainer.accelerator
        run.inner_model = run.model = trainer.model
        trainer.add_callback(callback_of(run, trainer))
        self._backoff = OomBackoff("Training", run.plan.batch_option("train"), run.warn, last_resorts=last_resorts(run))
        self._batches: list[Batch] = []
        self._law: Any = None

    @property
    def _trainer(self) -> Any:
        """This object as the Trainer that it is."""
        return self

    # hooks of the Trainer

    def call_model_init(self, trial: Any = None) -> Any:
        parent: Any = super()
        return self._run.fitted(parent.call_model_init(trial))

    def create_optimizer(self, model: Any = None) -> Any:
        parent: Any = super()
        trainer, recipe = self._trainer, self._run.recipe
        if trainer.optimizer is None and (recipe.optimizer is not None or len(recipe.optimizer_wraps)):
            module = trainer.model if model is None else model
            trained = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
            decays = set(trainer.get_decay_parameter_names(module))  # the Trainer's own groups
            args = trainer.args
            common = {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
            groups = [
                common | {"params": [p for name, p in trained if (name in decays) is decay], "weight_decay": rate}
                for decay, rate in ((True, args.weight_decay), (False, 0.0))
            ]
            make = recipe.optimizer or torch.optim.AdamW
            optimizer = make([group for group in groups if group["params"]])
            for wrap in recipe.optimizer_wraps:
                optimizer = wrap(optimizer, self._run)
            trainer.optimizer = optimizer
        return parent.create_optimizer(model)

    def get_train_dataloader(self) -> Any:
        parent: Any = super()
        loader = parent.get_train_dataloader()
        try:
            batches = len(loader)
        except TypeError:  # an IterableDataset
            batches = 1
        self._run.train_loader = Loader(loader, ceil(batches / self._trainer.args.gradient_accumulation_steps))
        return loader

    def get_batch_samples(self, *positional: Any, **named: Any) -> Any:
        parent: Any = super()
        found = parent.get_batch_samples(*positional, **named)
        self._batches, self._counted = list(found[0]), found[1] is not None
        self._left = len(self._batches)
        return found

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """The loss of the step in the call for its last batch; nothing is computed in the calls before it."""
        parent: Any = super()
        compute = partial(parent.training_step, model)
        if self._law is None:
            self._run.stop_observing()
            self._law = self._additivity(model)
            self._run.observe()
            if self._law.law:
                self._run.say(f"a step is split by length: {self._law.reason}")
            else:
                self._run.leave_out(dict.fromkeys(("cut", "batch['train']"), f"a step is not split: {self._law.reason}"))
        self._left -= 1
        if self._law.law is None:
            self._note([(rows_of(inputs) or 1, 0)] if self._left else [(rows_of(each) or 1, 0) for each in self._batches])
            with self._whole_batch():
                return compute(inputs, num_items_in_batch)
        if self._left:
            return torch.zeros((), device=self._trainer.args.device)
        return self._whole_step(model, compute, num_items_in_batch)

    @contextmanager
    def _whole_batch(self) -> Iterator[None]:
        """A block for a batch that is not split: an out-of-memory error of it says why, and what to change."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise DoesNotFitError(
                f"a batch of {self._trainer.args.per_device_train_batch_size} rows does not fit, and it is not split: "
                f"{self._law.reason}. Lower per_device_train_batch_size and raise gradient_accumulation_steps, or set "
                f"gradient_checkpointing = True ({first_line(error)})"
            ) from error

    def compute_loss(self, *positional: Any, **named: Any) -> Any:
        parent: Any = super()
        found = parent.compute_loss(*positional, **named)
        if self._weight == 1.0:
            return found
        return (found[0] * self._weight, *found[1:]) if isinstance(found, tuple) else found * self._weight

    def train(self, *positional: Any, **named: Any) -> Any:
        parent: Any = super()
        run = self._run
        with run.process():
            try:
                return parent.train(*positional, **named)
            except BaseException as error:
                run.error = error
                raise
            finally:
                run.stop_observing()
                if self._law is not None and self._law.law and (line := run.token_line()):
                    run.say(line)
                run.listener.on_end(run, DONE if run.error is None else str(run.error) or type(run.error).__name__)

    def _save(self, *positional: Any, **named: Any) -> None:
        parent: Any = super()
        changed, self._trainer.args = self._trainer.args, self._own_args
        try:
            parent._save(*positional, **named)  # training_args.bin holds the user's own arguments
        finally:
            self._trainer.args = changed

    # the step

    def _additivity(self, model: Any) -> Any:
        """The law of the loss, confirmed on rows of the first step: a mismatch takes the permission to split away."""
        found = additivity_of(self._trainer, self._counted, self._settings.additive)
        first = self._batches[0]
        if found.law is not None and (rows_of(as_pairs(first) if found.pairs else first) or 0) < 2:
            return found
        if found.law is not None and not self._agrees(model, first, found):
            return Additivity(None, f"{found.reason}, and yet the losses of parts of the first batch do not add up to it")
        return found

    def _agrees(self, model: Any, batch: Batch, law: Any) -> bool:
        """Whether the losses of single rows of `batch` add up to the loss of `PROBED_ROWS`, without dropout and gradients.

        A difference counts against the spread of the rows' losses: rows of an untrained model have almost the same loss.
        """
        trainer, counters = self._trainer, self._counters()
        few = first_rows(batch, PROBED_ROWS, law.pairs)
        rows = self._parts([few], law, cut_in_order, 1)
        count = torch.tensor(100, device=trainer.args.device) if self._counted else None
        parent: Any = super()

        def loss_of(inputs: Batch) -> float:
            prepared = trainer._prepare_inputs(dict(inputs))
            return float(parent.compute_loss(model, prepared, num_items_in_batch=count))

        training = inner(model).training
        model.eval()
        with torch.no_grad(), kept_random_state():
            whole = loss_of(few)
            losses = [loss_of(part.inputs) for part in rows]
        model.train(training)
        vars(self).update(counters)
        rough = trainer.accelerator.mixed_precision != "no" or torch.backends.cuda.matmul.fp32_precision == "tf32"
        parts = sum(loss * part.weight for loss, part in zip(losses, rows, strict=True))
        spread = max(losses) - min(losses)
        return abs(parts - whole) <= (0.1 * spread + 1e-2 * abs(whole) if rough else 1e-4 * spread + 4e-6 * abs(whole)) + 1e-7

    def _parts(self, batches: list[Batch], law: Any, cut: Any, rows: int, halvings: int = 0) -> list[MicroBatch]:
        trainer = self._trainer
        tokenizers = (getattr(trainer.data_collator, "tokenizer", None), getattr(trainer, "processing_class", None))
        known = (getattr(each, "pad_token_id", None) for each in (*tokenizers, getattr(inner(trainer.model), "config", None)))
        pad_id = next((number for number in known if number is not None), None)
        shifted = shifts_labels(trainer.model)
        return micro_batches(batches, law.law, cut, rows, halvings, pad_id=pad_id, shifted=shifted, pairs=law.pairs)

    def _whole_step(self, model: Any, compute: Callable[..., Any], count: Any) -> Any:
        """The loss of the step, detached; its gradients are accumulated. Again in smaller micro-batches if memory runs out."""
        run, backoff = self._run, self._backoff
        cut = run.recipe.cut or cut_in_order
        while True:
            parts = self._parts(self._batches, self._law, cut, run.batch.train, backoff.rung)
            counters = self._counters()
            try:
                with kept_random_state(only_on_error=True):
                    total = self._accumulated(model, compute, parts, count)
                break
            except torch.OutOfMemoryError as error:
                if run.world_size > 1:  # the other ranks wait in the reduction of gradients
                    raise
                reason = first_line(error)
            # after the except block: the exception's frames keep tensors alive
            for parameter in inner(model).parameters():
                parameter.grad = None
            vars(self).update(counters)
            free_memory(run.device)
            backoff.reduce(sum(len(part.lengths) for part in parts).bit_length(), f"at step {run.step + 1}", reason)
        backoff.step_succeeded()
        changed = self._merge_metrics(counters.get("_metrics", {}).get("train", {}), parts)
        if changed and not run.steps:
            run.say(f"logged as means over the rows of a step, unlike in the unmodified script: {', '.join(changed)}")
        self._note([part.size for part in parts], tuple(length for part in parts for length in part.lengths))
        return total

    def _merge_metrics(self, before: Mapping[str, Any], parts: list[MicroBatch]) -> list[str]:
        """Log for each batch of the step what TRL logged for each micro-batch; `before`: its lists before the step.

        Returns the names whose values differ from the unmodified script's: means over tokens, least and greatest values.
        """
        changed = []
        for name, values in getattr(self, "_metrics", {}).get("train", {}).items():
            new = values[len(before.get(name, ())) :]
            if len(new) != len(parts):
                continue
            shares = [part.weight if self._law.law != "sum" else labels_in(part.inputs, True) for part in parts]
            mean = sum(value * share for value, share in zip(new, shares, strict=True)) / (sum(shares) or 1)
            values[len(values) - len(new) :] = [mean] * len(self._batches)
            if not (self._law.law == "rows" and name.startswith(ROW_MEANS)):
                changed.append(name)
        return sorted(changed)

    def _counters(self) -> dict[str, Any]:
        """What a trainer counts and averages while it computes losses, such as TRL's tokens: a failed attempt must not count."""
        own = {name: value for name, value in vars(self).items() if type(value) in (int, float)}
        return own | ({"_metrics": copy.deepcopy(self._metrics)} if hasattr(self, "_metrics") else {})

    def _accumulated(self, model: Any, compute: Callable[..., Any], parts: list[MicroBatch], count: Any) -> Any:
        total: Any = 0.0
        try:
            for number, part in enumerate(parts):
                self._weight = part.weight
                last = number == len(parts) - 1
                with nullcontext() if last else self._trainer.accelerator.no_sync(model=model):
                    total = total + compute(part.inputs, count)
        finally:
            self._weight = 1.0
        return total

    def _note(self, sizes: list[tuple[int, int]], lengths: tuple[int, ...] = ()) -> None:
        """Keep the micro-batches of the step for evidence."""
        run = self._run
        pinned = bool(getattr(run.train_loader, "pin_memory", False)) and run.device.type != "cpu"
        run.last_step_batch = ScriptStep(run.step, lengths, sizes, pinned)


def default_arguments(trainer: type, model: Any) -> Any:
    """The arguments that `trainer` uses if it is given none: those of TRL's class of the same name, else TrainingArguments."""
    from transformers import TrainingArguments

    name = trainer.__name__.removesuffix("Trainer") + "Config"
    package = importlib.import_module(trainer.__module__.partition(".")[0])
    if isinstance(found := getattr(package, name, None), type) and issubclass(found, TrainingArguments):
        label = model if isinstance(model, str) else getattr(getattr(model, "config", None), "_name_or_path", "")
        return found(f"{label.rpartition('/')[2] or 'trainer'}-{trainer.__name__.removesuffix('Trainer')}")
    return TrainingArguments("trainer_output")


def described_model(model: Any, given: Mapping[str, Any]) -> Any:
    """What the plan reads of the model: itself, or the config of the name that the Trainer will load."""
    if isinstance(model, str):
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(model)
    if model is None:
        with kept_random_state():  # the Trainer calls it once more
            return given["model_init"]()
    return inner(model)


def refuse(model: Any, args: Any) -> None:
    """Raise InputError for scripts whose engine or wrapper a plan would contradict."""
    if type(model).__name__ in WRAPPERS:
        raise InputError(f"the model is wrapped in {type(model).__name__}: pass the model itself, the Trainer wraps it")
    if any(module._compiled_call_impl is not None for module in getattr(model, "modules", tuple)()):
        raise InputError("the model is compiled: pass it as it was before model.compile(), the plan compiles it where that helps")
    if args.deepspeed or args.fsdp:
        word = "deepspeed" if args.deepspeed else "fsdp"
        raise InputError(
            f"{word} in your arguments: its engine owns the step, which could not be split or repeated. "
            f"Remove {word}, or use the Trainer without optimized()"
        )


def refuse_old_versions() -> None:
    """Raise InputError for a transformers, accelerate or TRL that is older than the oldest one that hwopt is tested with."""
    from packaging.requirements import Requirement

    for requirement in map(Requirement, requires("hwopt") or ()):
        if requirement.name not in ("transformers", "accelerate", "trl") or requirement.extras:
            continue
        oldest = [each for each in requirement.specifier if each.operator == ">="]
        with suppress(PackageNotFoundError):
            found = version(requirement.name)
            if not all(each.contains(found, prereleases=True) for each in oldest):
                raise InputError(
                    f"{requirement.name} {found} is too old: hwopt needs {listing([str(each) for each in oldest])}. Upgrade it"
                )


def refuse_half_weights(model: Any, plan: Any) -> None:
    """Raise InputError if the plan computes with autocast over fp32 weights, and `model` has half-precision ones."""
    halves = {str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.dtype in (torch.float16, torch.bfloat16)}
    if halves and plan.recipe.model_kwargs.get("dtype") == "float32" and any(p.requires_grad for p in model.parameters()):
        raise InputError(
            f"the model has {' and '.join(sorted(halves))} weights, and the plan's precision needs float32 weights: small "
            "updates would be lost. Load it with dtype=torch.float32, or say precision={'level': 'pure'} or precision=False"
        )


@contextmanager
def kept_random_state(only_on_error: bool = False) -> Iterator[None]:
    """A block after which torch's random state is as before it; `only_on_error`: if it raises."""
    state = torch.get_rng_state()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else None

    def restore() -> None:
        torch.set_rng_state(state)
        if devices is not None:
            torch.cuda.set_rng_state_all(devices)

    try:
        yield
    except BaseException:
        restore()
        raise
    if not only_on_error:
        restore()


def callback_of(run: ScriptRun, trainer: Any) -> Any:
    """The callback that tells `run` where the Trainer is."""
    from transformers import TrainerCallback

    class Steps(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
            run.model, run.inner_model = objects["model"], trainer.accelerator.unwrap_model(trainer.model)
            run.scheduler = objects.get("lr_scheduler")
            optimizer = objects["optimizer"]
            run.optimizer = getattr(optimizer, "optimizer", optimizer)
            run.scaler = trainer.accelerator.scaler
            run.step, run.total_steps = state.global_step, state.max_steps
            for step in run.recipe.prepared_steps:
                step(run)
            run.listener.on_start(run)

        def on_step_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
            run.begin_step()

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
            run.end_step(trainer.accelerator.optimizer_step_was_skipped)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **objects: Any) -> None:
            if "train_runtime" in logs:
                run.listener.on_finish(run, {"step": state.global_step, **logs, "peak_memory_gib": peak_memory_gib(run.device)})
            else:
                run.listener.on_log(run, {"step": state.global_step, **logs})

    return Steps()
