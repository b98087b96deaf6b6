"""`Accelerator`: Accelerate's, whose `prepare()` also applies a plan to the model and the optimizer (docs/your-script.md)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from inspect import signature
from typing import Any

import accelerate
import torch
from accelerate.data_loader import DataLoaderShard
from accelerate.state import AcceleratorState
from accelerate.utils import parse_flag_from_env
from torch.nn.utils import skip_init
from torch.utils.data import DataLoader

from hwopt.errors import InputError
from hwopt.hardware.layer_speed import LARGEST
from hwopt.hosts.additivity import refuse_other_laws
from hwopt.hosts.collated import Batch, CollatedPart
from hwopt.hosts.limits import engine_lacks
from hwopt.hosts.pieces import with_defaults
from hwopt.hosts.script_run import Lines, ScriptRun, with_lines
from hwopt.hosts.torch import Session, planned
from hwopt.training.listener import Listener

OWN_ENGINE = ("deepspeed_plugin", "fsdp_plugin", "megatron_lm_plugin")
"""Arguments of Accelerate's class that bring an engine, which owns model, optimizer and step."""
WIDE = LARGEST + 1  # a layer that is not measured: the device decides
ROWS = 8  # rows of a batch where no loader says a number


class Accelerator(accelerate.Accelerator):
    """Accelerate's Accelerator with a plan of `profile`.

    `additive`: as in `hwopt.session`; needed for `micro_batches`. `named`: arguments of Accelerate's class, and plugin -> its
    options, or False to leave it out. `mixed_precision` and engines that the script passes win over the profile. With
    `strict`, an error for each plugin that is not applied. Raises InputError and PluginError, as `hwopt.resolve` does.
    """

    def __init__(
        self,
        *positional: Any,
        profile: str = "auto",
        additive: str | None = None,
        strict: bool = False,
        listener: Listener | None = None,
        **named: Any,
    ) -> None:
        refuse_other_laws(additive)
        theirs = signature(accelerate.Accelerator).parameters
        named |= dict(zip(theirs, positional, strict=False))
        self.hwopt_profile, self.hwopt_additive, self.hwopt_strict = profile, additive, strict
        self.hwopt_plugins = {name: named.pop(name) for name in list(named) if name not in theirs}
        self.hwopt_listener = with_lines(listener)
        self.hwopt_session: Session | None = None
        self.hwopt_waiting: list[Any] = []  # optimizers that the script prepares before its model
        given = named.get("mixed_precision") or os.environ.get("ACCELERATE_MIXED_PRECISION")
        self.hwopt_own_precision = bool(given) or any(named.get(name) is not None for name in OWN_ENGINE)
        if self.hwopt_own_precision:
            super().__init__(**named)
        else:
            # the device decides the precision; the model is not known yet
            unknown = skip_init(torch.nn.Linear, WIDE, WIDE)  # draws no random numbers: the script's model may be made later
            on_cpu = bool(named.get("cpu")) or parse_flag_from_env("ACCELERATE_USE_CPU")
            found = planned(profile, unknown, ROWS, None, self.hwopt_plugins, strict=False, on_cpu=on_cpu)
            named["mixed_precision"] = found.plan.recipe.accelerator.get("mixed_precision", "no")
            self._init_with_precision(named)
        self.dataloader_config.non_blocking |= self.device.type == "cuda"

    def _init_with_precision(self, named: dict[str, Any]) -> None:
        """Accelerate's constructor. It has one precision for the process; the plan's is that of this object alone."""
        shared = AcceleratorState._shared_state
        before = shared.get("_mixed_precision", "no")
        if shared:  # else it refuses another one
            shared["_mixed_precision"] = named["mixed_precision"]
        try:
            super().__init__(**named)
            self.state.__dict__ = dict(shared)
        finally:
            if shared:
                shared["_mixed_precision"] = before

    def prepare(self, *objects: Any, **named: Any) -> Any:
        """Accelerate's `prepare`, after the plan's part for the first model and its optimizers."""
        models = [each for each in objects if isinstance(each, torch.nn.Module)]
        first = self.hwopt_session is None and bool(models)
        try:
            prepared = self._first_prepared(models.pop(0), objects, named) if first else super().prepare(*objects, **named)
            for each in prepared if isinstance(prepared, tuple) else (prepared,):
                if isinstance(each, DataLoaderShard) and self.non_blocking:
                    each.base_dataloader.pin_memory = True  # a copy from other memory waits for the device
            self.hwopt_waiting += [each for each in objects if isinstance(each, torch.optim.Optimizer)]
            if self.hwopt_session is not None:
                self.hwopt_session.models += models
                while self.hwopt_waiting:
                    optimizer = self.hwopt_waiting.pop(0)
                    as_planned(optimizer, self.hwopt_session)
                    self.hwopt_session.follow(optimizer)
        except BaseException as error:
            if first:
                self._end(error)
            raise
        return prepared

    def _first_prepared(self, model: Any, objects: tuple[Any, ...], named: dict[str, Any]) -> Any:
        session = self.hwopt_session = self._session_for(model, objects)
        fitted = session.apply_to(model)
        if self.device.type == "cpu" and session.run.recipe.accelerator.get("mixed_precision") == "no":
            self.native_amp, self.state._mixed_precision = False, "no"  # this model's layers are faster in fp32
        prepared = super().prepare(*(fitted if each is model else each for each in objects), **named)
        run = session.run
        run.accelerator, run.scaler, run.device = self, self.scaler, self.device
        found = prepared if isinstance(prepared, tuple) else (prepared,)
        run.model = next(each for each in found if isinstance(each, torch.nn.Module))
        run.inner_model = self.unwrap_model(run.model)
        return prepared

    def prepare_model(self, *positional: Any, **named: Any) -> Any:
        """Accelerate's, which `prepare` calls; alone it applies no plan."""
        if self.hwopt_session is None and self.is_main_process:
            Lines().on_message(None, "prepare_model() applies no plan: call accelerator.prepare(model, optimizer, …) instead")
        return super().prepare_model(*positional, **named)

    def free_memory(self, *objects: Any) -> Any:
        """Accelerate's; the next `prepare` makes a plan for its model."""
        self._end()
        return super().free_memory(*objects)

    def _end(self, error: BaseException | None = None) -> None:
        if self.hwopt_session is not None:
            session, self.hwopt_session = self.hwopt_session, None
            session.close(error)

    def _session_for(self, model: Any, objects: tuple[Any, ...]) -> Session:
        rows = next((each.batch_size for each in objects if isinstance(each, DataLoader)), None) or ROWS
        lacks = {}
        if self.hwopt_own_precision:
            lacks["accelerator['mixed_precision']"] = f"mixed_precision = {self.mixed_precision!r} of your script"
        if self.distributed_type in ("DEEPSPEED", "FSDP", "MEGATRON_LM"):
            lacks |= engine_lacks(f"{self.distributed_type.lower()} of your script")
        rows, settings = rows * self.gradient_accumulation_steps * self.num_processes, (self.hwopt_plugins, self.hwopt_strict)
        script = {"lacks": lacks, "world_size": self.num_processes, "on_cpu": self.device.type == "cpu"}
        found = planned(self.hwopt_profile, model, rows, self.hwopt_additive, *settings, **script)
        return Session(found, model, self.hwopt_additive, self.hwopt_listener, self.process_index)

    def _prepared(self) -> Session:
        if self.hwopt_session is None:
            raise InputError("accelerator.prepare(model, optimizer, …) comes first")
        return self.hwopt_session

    def micro_batches(self, batch: Batch) -> Iterator[CollatedPart]:
        """The parts of `batch` by length: `accelerator.backward(model(**micro.inputs).loss * micro.weight)` for each."""
        return self._prepared().micro_batches(batch)

    def accumulate_batch(self, batch: Batch, loss: Any) -> torch.Tensor:
        """As `Session.accumulate`, with this object's `backward`. `loss`: inputs -> the loss."""
        return self._prepared().accumulate(batch, loss, self.backward)

    def end_training(self) -> None:
        """Accelerate's, and the process is as it was before the plan."""
        super().end_training()
        owner = ScriptRun.active and ScriptRun.active.accelerator  # in a notebook this name may stand for a new object by now
        (owner if isinstance(owner, Accelerator) else self)._end()


def as_planned(optimizer: torch.optim.Optimizer, session: Session) -> None:
    """Let the script's optimizer, which its schedulers hold, use the kernels of the plan's one if both are of one class."""
    if (make := session.run.recipe.optimizer) is None:
        return
    sample = make(with_defaults([torch.nn.Parameter(torch.zeros(1, device=session.run.device))], {}))
    theirs, ours = ({key: each.defaults.get(key) for key in ("fused", "foreach")} for each in (optimizer, sample))
    own = [f" with {key} = {value}" for key, value in theirs.items() if value not in (None, ours[key])]
    if type(sample) is type(optimizer) and not optimizer.state and not own:
        for group in (optimizer.defaults, *optimizer.param_groups):
            group.update(ours)
        if ours["fused"]:
            optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]  # what the class sets when it is made fused
        return
    why = f"your script makes its own {type(optimizer).__name__}{''.join(own)}; hwopt.optimizer(profile) makes the profile's"
    session.run.leave_out({"optimizer": why})
