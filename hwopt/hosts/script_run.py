"""The running objects of somebody else's loop as a RunView: what plugins, their evidence and their events read of a run."""

from __future__ import annotations

import atexit
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast
from unittest import mock

import torch
from torch import Tensor

from hwopt.data.batches.step_batch import Widths
from hwopt.distributed.oom_backoff import OomBackoff
from hwopt.errors import InputError
from hwopt.hardware.cuda_memory import release_unused_memory
from hwopt.hosts.arguments import kept_overrides
from hwopt.hosts.collated import AS_LONG, CollatedPart
from hwopt.hosts.script_plan import transformers_model
from hwopt.model.adapters import casts_outside_autocast
from hwopt.planning.parts import without
from hwopt.planning.plan import Plan
from hwopt.plugin import Observation
from hwopt.plugin.guard import guarded_context
from hwopt.text import counted, printable
from hwopt.training import evidence
from hwopt.training.build import refuse_different_plans
from hwopt.training.failure import last_resorts
from hwopt.training.listener import Listener, Listeners
from hwopt.training.run import PlannedRun


@dataclass(frozen=True)
class ScriptStep:
    """What evidence reads of a finished step, as of a `hwopt.data.batches.step_batch.StepBatch`."""

    index: int
    lengths: tuple[int, ...]  # tokens of each row, in the order of the micro-batches
    sizes: list[tuple[int, int]]  # (rows, width) of each micro-batch
    pinned: bool = False
    cuts: int = 1  # of rows into micro-batches, the longest rows first: the lengths grow between two cuts only
    widths: Widths = field(default_factory=Widths)  # what its micro-batches were padded to
    ignored: int = 0  # rows in no micro-batch, because none of their labels counts

    @classmethod
    def of(cls, index: int, parts: Sequence[CollatedPart], pinned: bool = False, widths: Widths = AS_LONG) -> ScriptStep:
        """The step of these `parts`."""
        lengths, ignored = tuple(length for part in parts for length in part.lengths), sum(part.ignored for part in parts)
        return cls(index, lengths, [part.size for part in parts], pinned, sum(part.first for part in parts), widths, ignored)

    @property
    def step(self) -> ScriptStep:
        return self

    @property
    def rows(self) -> int:
        return sum(rows for rows, _ in self.sizes) + self.ignored

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def computed(self) -> int:
        """Tokens with padding."""
        return sum(rows * width for rows, width in self.sizes)


class ScriptEngine:
    """The host's optimizer and gradients as an EngineView."""

    keeps_masters = False
    whole_gradients = True

    def __init__(self, run: ScriptRun) -> None:
        self.run = run
        self.norm = torch.zeros(())
        self.found_inf = torch.zeros(())

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for group in self.run.optimizer.param_groups for parameter in group["params"]]

    @property
    def names(self) -> list[str]:
        known = {parameter: name for name, parameter in self.run.inner_model.named_parameters()}
        return [known.get(parameter, "?") for parameter in self.parameters]

    def gradients(self) -> Sequence[tuple[str, Tensor]]:
        return [(name, p.grad) for name, p in zip(self.names, self.parameters, strict=True) if p.grad is not None]

    def loss_scale(self) -> Tensor | None:
        scaler = self.run.scaler
        return None if scaler is None else torch.tensor(scaler.get_scale())


class Loader:
    """The host's data loader, with the sampler that evidence reads."""

    def __init__(self, loader: Any, steps_per_epoch: int | None) -> None:
        self._loader = getattr(loader, "base_dataloader", loader)
        self.sampler = SimpleNamespace(steps_per_epoch=steps_per_epoch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class ScriptRun(PlannedRun):
    """A RunView over the objects of a script. The host sets its attributes as they come into being."""

    active: ClassVar[ScriptRun | None] = None  # the run whose process contexts are entered
    inner_model = model = accelerator = optimizer = scheduler = scaler = train_loader = eval_loader = cast("Any", None)

    def __init__(self, plan: Plan, device: torch.device, folder: Path, listener: Listener, rank: int = 0) -> None:
        self.plan, self.device = plan, device
        self.world_size, self.rank = plan.world_size, rank
        self.folder = self.extras = folder
        self.listener = listener if self.is_main else Listener()
        self.error: BaseException | None = None  # what ended the training
        self.observation = Observation()
        self.engine = ScriptEngine(self)
        self.forward_backward: Any = None  # both passes of a micro-batch, while a Trainer trains
        self.step = self.total_steps = 0
        self.began = False  # whether this process has started a step
        self.step_batch: ScriptStep | None = None  # known at the end of a step only
        self.last_step_batch: ScriptStep | None = None
        self.steps: list[ScriptStep] = []
        self.found: evidence.Collected = []
        self.observing = ExitStack()
        atexit.register(self.observing.close)
        self.below_loss: Any = None  # the part of the model that computes no loss, where a plugin's loss is in the model
        self.compiled: dict[torch.nn.Module, Any] = {}  # a module that the plan compiled -> its compiled call
        self.stack = ExitStack()  # what ends with `process`
        self.backoff = OomBackoff("Training", plan.batch_option("train"), self.warn, last_resorts=last_resorts(self))
        if device.type == "mps":
            self.say("this Mac's GPU (MPS) trains with the plan of its CPU: hwopt has no profile for it and forecasts no memory")

    @property
    def parameter_names(self) -> list[str]:
        return self.engine.names

    @property
    def samples(self) -> int:
        """Rows of the training data; 0 for an IterableDataset."""
        return operator.length_hint(getattr(self.train_loader, "dataset", ()))

    @property
    def parts(self) -> list[Any]:
        return list(self.recipe.events)

    @property
    def loss(self) -> Any:
        raise NotImplementedError("the loss is the script's")

    @contextmanager
    def process(self) -> Iterator[None]:
        """A block with the plugins' process contexts: attention kernels, TF32, the allocator."""
        if ScriptRun.active is not None:
            ways = "end its session, call accelerator.end_training(), or undo() of what hwopt.apply() returned"
            raise InputError(f"another plan is active in this process: {ways}")
        refuse_different_plans(self.plan)
        with kept_overrides(), ExitStack() as self.stack:
            ScriptRun.active = self
            self.stack.callback(setattr, ScriptRun, "active", None)
            for enter in self.recipe.process:
                self.stack.enter_context(guarded_context(enter))
            yield

    def adapt(self, model: Any) -> None:
        """Let the adapters in `model` compute without casts that change no bit, until `process` ends."""
        self.stack.enter_context(casts_outside_autocast(model, self.device.type))

    def fitted(self, model: Any) -> Any:
        """`model`, with the attention kernel of the plan and after the plan's model steps."""
        wanted = self.recipe.model_kwargs.get("attn_implementation")
        attends = transformers_model(model)
        present = getattr(getattr(attends, "config", None), "_attn_implementation", None)
        if wanted is not None and present is not None and present != wanted:
            attends.set_attn_implementation(wanted)
        recipe = self.recipe
        # the Trainer has loaded the model with what is in `trainer`; a loss changes the model in training steps alone
        others = {recipe.named(recipe.author_of(what)) for what in ("loss", *(f"trainer[{key!r}]" for key in recipe.trainer))}
        for step in recipe.model_steps:
            model = model if getattr(step, "who", "") in others else step(model, self)
        self.inner_model = self.model = model
        return model

    def leave_out(self, lacking: Mapping[str, str]) -> None:
        """Skip the plugins that write a field or key of `lacking`, which the host does not honour after all, and say so."""
        entries = tuple(without(lacking, entry, self.recipe) for entry in self.plan.entries)
        for old, new in zip(self.plan.entries, entries, strict=True):
            if old is not new:
                self.say(f"skip     {new.name}: {new.reason}")
        self.plan = replace(self.plan, entries=entries)

    def take_prepared_steps(self) -> None:
        """The plan's steps for a prepared model. What they compile is compiled in training steps alone: others have any width."""
        applied = {self.recipe.named(entry.author) for entry in self.plan.applied()}
        with mock.patch.object(self, "inner_model", self.below_loss or self.inner_model):
            for step in self.recipe.prepared_steps:
                if getattr(step, "who", "") in applied:
                    step(self)
        if compiled := [module for module in self.inner_model.modules() if module._compiled_call_impl is not None]:
            self.compiled = {module: module._compiled_call_impl for module in compiled}
            self.stack.callback(self.compiled.clear)
            self.stack.callback(self.call_compiled, False)

    def call_compiled(self, within: bool) -> None:
        """Let the modules that the plan compiled be called compiled, or as they were."""
        for module, present in self.compiled.items():
            if within:
                module._compiled_call_impl = present
            else:
                self.compiled[module], module._compiled_call_impl = module._compiled_call_impl, None

    def begin_step(self) -> None:
        if not self.began:
            self.began = True
            release_unused_memory()  # what loading and quantizing the model left in the allocator
        self.recipe.events.on_step_begin(self)
        self.call_compiled(True)
        if self.step in (0, self.total_steps - 1):
            self.observe()

    def observe(self) -> None:
        """Record the operators that run until `stop_observing`."""
        self.observing.close()
        self.observing.enter_context(evidence.observing(self))

    def stop_observing(self) -> None:
        """Leave the profiler, also after an error and when the script ends: one that is left open crashes the interpreter."""
        self.observing.close()

    def end_step(self, skipped: bool) -> None:
        """The optimizer was called; `skipped`: the scaler left the update out."""
        self.stop_observing()
        self.step += 1
        self.engine.found_inf = torch.tensor(float(skipped))
        self.recipe.events.on_step_end(self, torch.tensor(not skipped))
        if self.last_step_batch is not None:
            self.steps.append(self.last_step_batch)
        if self.step in (1, self.total_steps):
            self.collect()
        self.call_compiled(False)

    def collect(self) -> None:
        """Collect the evidence of every plugin, and warn of plugins that are not active any more."""
        found = evidence.collect(self)
        (self.listener.on_final_evidence if self.found else self.listener.on_evidence)(self, found)
        for warning in evidence.ceased(self.found, found):
            self.warn(warning)
        self.found = found

    def make_smaller(self, trained: Iterable[torch.nn.Parameter], rows: int, reason: str) -> None:
        """Free the gradients of a step of `rows` rows that ran out of memory, and let the next try have smaller parts.

        If the passes kept memory, that is freed instead, and the parts stay.
        """
        for parameter in trained:
            parameter.grad = None
        freed = self.forward_backward is not None and self.forward_backward.free()
        release_unused_memory()
        if not freed:
            self.backoff.reduce(rows.bit_length(), f"at step {self.step + 1}", reason)

    def token_line(self) -> str:
        """What splitting by length saved, as a sentence; "" before the first step."""
        if not self.steps:
            return ""
        real, computed = sum(step.tokens for step in self.steps), sum(step.computed for step in self.steps)
        steps = f"{counted(len(self.steps), 'step')} in {counted(sum(len(step.sizes) for step in self.steps), 'micro-batch')}"
        return f"{steps}: {computed:,} tokens computed, {real:,} without padding"


class Lines(Listener):
    """Prints what the plan says and what evidence finds, as lines between those of the script."""

    def on_message(self, run: Any, message: str) -> None:
        print(f"hwopt: {printable(message)}", flush=True)

    def on_warning(self, run: Any, message: str) -> None:
        self.on_message(run, f"WARNING: {message}")

    def on_evidence(self, run: Any, found: list[Any]) -> None:
        for decision, each in found:
            self.on_message(run, f"after step {run.step}: {each.status:8} {decision.name}: {each.seen}")

    on_final_evidence = on_evidence


def with_lines(listener: Listener | None, *files: Listener) -> Listeners:
    """`listener`, lines on the terminal, and `files`."""
    return Listeners(*([listener] if listener else []), Lines(), *files)
