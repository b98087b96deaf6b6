"""`session`: a plan in a bare loop of torch, or of Fabric (docs/your-script.md).

The step ends with `optimizer.step()`. At the end of the block the process and the model's forward method are as before it; what
the plan did to the model itself (checkpointing, compilation) stays.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from numbers import Integral
from pathlib import Path
from typing import Any

import torch

from hwopt.data.batches.collate import cut_in_order
from hwopt.errors import InputError
from hwopt.hosts.additivity import device_of, inner, refuse_other_laws, rows_meet, shifts_labels, without_dropout
from hwopt.hosts.apply import ReplacedForward
from hwopt.hosts.collated import Batch, CollatedPart, micro_batches, rows_of
from hwopt.hosts.limits import NOT_ADDITIVE, SCRIPT_LACKS, STEP_FIELDS, refuse_prepared
from hwopt.hosts.pieces import made_with
from hwopt.hosts.probe import disturbed, is_rough, laws_that_agree, pad_id_of, probed_rows
from hwopt.hosts.script_plan import Script, ScriptPlan, plan_for, transformers_model
from hwopt.hosts.script_run import Loader, ScriptRun, ScriptStep, with_lines
from hwopt.system.ranks import rank_and_world
from hwopt.text import first_line, truncate
from hwopt.training.listener import DONE, Listener


class ForwardPreHook:
    """Calls `begin` before each forward pass. The hook of a copied or pickled model returns its inputs, and needs no hwopt."""

    def __init__(self, begin: Callable[[], None]) -> None:
        self.begin = begin

    def __call__(self, module: Any, inputs: Any) -> None:
        self.begin()

    def __reduce__(self) -> Any:
        return getattr, ({}, "get")


class Session:
    """A plan over the objects of a loop that is not hwopt's. `run` is what plugins and evidence see of it."""

    def __init__(self, found: ScriptPlan, model: Any, additive: str | None, listener: Listener, rank: int = 0) -> None:
        self.model, self.additive = model, additive
        place = device_of(model)
        if place.type == "cpu" and found.plan.hardware.device_type == "cuda":  # the loop may move it later, as Fabric does
            place = torch.device("cuda")
        self.run = ScriptRun(found.plan, place, Path(), listener, rank)
        self.run.train_loader = Loader((), None)  # the script's own is not seen
        self.stack = ExitStack()
        for line in found.lines():
            self.run.say(line)
        self.parts: list[CollatedPart] = []
        self.in_step = False
        self.models, self.optimizers = [model], list[Any]()
        """What the loop trains: models in the order of `prepare`, and the optimizers that are followed."""
        self.shifted: bool | None = None  # whether the first column of a row predicts nothing; None before the first batch

    def __enter__(self) -> Session:
        model = self.apply_to(self.model)
        if self.run.recipe.accelerator.get("mixed_precision") == "bf16":
            self.stack.callback(setattr, model, "forward", model.forward)
            model.forward = ReplacedForward(model.forward, torch.autocast(self.run.device.type, torch.bfloat16)(model.forward))
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.close(error)

    def apply_to(self, model: Any) -> Any:
        """`model` after the plan's model steps; the process has the plan's kernels until `close`."""
        self.stack.enter_context(self.run.process())
        self.stack.callback(self.run.stop_observing)
        model = self.models[0] = self.run.fitted(model)
        self.run.adapt(model)
        self.stack.callback(model.register_forward_pre_hook(ForwardPreHook(self.begin_step)).remove)
        return model

    def optimizer(self, parameters: Any, **defaults: Any) -> Any:
        """The plan's optimizer over parameters or groups. `defaults` (lr, betas, eps, weight_decay): torch's unless given."""
        self._refuse_unentered()
        made = made_with(self.run.recipe.optimizer or torch.optim.AdamW, parameters, defaults)
        self.follow(made)
        return made

    def _refuse_unentered(self) -> None:
        if self.run.inner_model is None:
            raise InputError("the plan is not applied yet: use `with hwopt.session(…) as session:`")

    def follow(self, optimizer: Any) -> None:
        """Count the steps of `optimizer`, made by the loop; of several ones, the first that steps ends the step of the loop."""
        self.optimizers.append(optimizer)
        if self.run.optimizer is None:
            self.run.optimizer = optimizer
        self.stack.callback(optimizer.register_step_post_hook(lambda *_: self.end_step()).remove)
        self.stack.callback(optimizer.register_load_state_dict_pre_hook(with_own_kernels).remove)

    def micro_batches(self, batch: Batch) -> Iterator[CollatedPart]:
        """The parts of `batch` by length; each loss is to be multiplied by its `weight`. The whole batch without `additive`."""
        self._refuse_unentered()
        law: Any = self.additive
        if not law:
            inputs: Any = dict(batch) if isinstance(batch, Mapping) else batch
            parts = [CollatedPart(inputs, 1.0, (0,) * (rows_of(batch) or 1))]
        elif not isinstance(batch, Mapping):
            raise InputError(f"additive = {law!r}: a batch is split if it is a dict of tensors, got {type(batch).__name__}")
        elif law == "labels" and "labels" not in batch:
            raise InputError('additive = "labels": the batch has no "labels"')
        else:
            cut = self.run.recipe.cut or cut_in_order
            shifted = self._shifts() if self.shifted is None else self.shifted
            parts = micro_batches([batch], law, cut, self.run.batch.train, self.run.backoff.rung, shifted=shifted)
        self.parts += parts
        shared = self.run.accelerator is not None and self.run.world_size > 1
        for number, part in enumerate(parts, 1):
            # ranks have other numbers of parts, and gradients meet once
            with self.run.accelerator.no_sync(self.run.model) if shared and number < len(parts) else nullcontext():
                yield part

    def accumulate(
        self,
        batch: Batch,
        loss: Callable[[dict[str, Any]], torch.Tensor],
        backward: Callable[[torch.Tensor], None] = torch.Tensor.backward,
    ) -> torch.Tensor:
        """The loss of `batch`, detached, with its gradients accumulated. Repeats it in smaller parts if memory runs out.

        `loss` takes the inputs of a part. Needs `additive`, and gradients that are None at the start of the step.
        Raises InputError if the losses of a few rows contradict `additive`, torch.OutOfMemoryError where a step cannot be
        repeated, and DoesNotFitError if single rows do not fit.
        """
        if not self.optimizers:
            raise InputError("no optimizer yet: call session.optimizer(), or session.follow() or accelerator.prepare() for yours")
        if self.additive and self.shifted is None:
            self._confirm(batch, loss)
        trained = list(self._trained())
        first = all(parameter.grad is None for parameter in trained)
        before = len(self.parts)
        while True:
            total: Any = None
            try:
                for part in self.micro_batches(batch):
                    weighted = loss(part.inputs)
                    weighted = weighted if part.weight == 1.0 else weighted * part.weight
                    backward(weighted)
                    total = weighted.detach() if total is None else total + weighted.detach()
                self.run.backoff.step_succeeded()
                return torch.zeros((), device=self.run.device) if total is None else total
            except torch.OutOfMemoryError as error:
                if why := self._why_not_repeated(first):
                    error.add_note(why)
                    raise
                reason = first_line(error)
            # after the except block: the exception's frames keep tensors alive
            del self.parts[before:]
            self.run.make_smaller(trained, rows_of(batch) or 1, reason)

    def _why_not_repeated(self, first: bool) -> str:
        """Why a batch that ran out of memory is not repeated, and what to do; "" if it is. `first`: of the step.

        The failed backward pass has added some of its gradients to those of earlier batches. These cannot be computed again: the
        function of the loss may read variables of the loop, which belong to the present batch by now.
        """
        if not self.additive:
            return 'hwopt splits a batch, and repeats it in smaller parts, if you say additive="rows", "labels" or "sum"'
        lower = f"lower {self.run.plan.batch_option('train')} (now {self.run.batch.train} rows at once)"
        if self.run.world_size > 1:
            return f"hwopt does not repeat a batch on several ranks: {lower}"
        why = (
            "hwopt repeats only the first batch of a step: gradients of this one may be in the weights already. Pass all rows of"
        )
        return "" if first else f"{why} a step as one batch, which is split and repeated as a whole, or {lower}"

    def _trained(self) -> Iterator[torch.nn.Parameter]:
        """The parameters of all models and optimizers; one of both comes twice."""
        for model in self.models:
            yield from model.parameters()
        for optimizer in self.optimizers:
            yield from (parameter for group in optimizer.param_groups for parameter in group["params"])

    def _shifts(self) -> bool:
        return any(shifts_labels(transformers_model(inner(model))) for model in self.models)

    def _confirm(self, batch: Batch, loss: Callable[[dict[str, Any]], torch.Tensor]) -> None:
        """Compare `additive` with the losses of single rows of the first batch, and see whether the labels are shifted."""
        law: Any = self.additive
        self.shifted = self._shifts()
        if not isinstance(batch, Mapping) or (rows_of(batch) or 0) < 2 or (law == "labels" and "labels" not in batch):
            return
        pad_id = pad_id_of(*(getattr(transformers_model(inner(model)), "config", None) for model in self.models))
        rough = is_rough(self.run.recipe.accelerator.get("mixed_precision", "no"))
        with torch.no_grad(), torch.random.fork_rng(range(torch.cuda.device_count())), ExitStack() as stack:
            for model in self.models:
                stack.enter_context(without_dropout(model))
                stack.enter_context(disturbed(model))
            few, laws = probed_rows(batch, pad_id), [(law, self.shifted), (law, not self.shifted)]
            found = laws_that_agree(lambda inputs: float(loss(inputs)), few, laws, rough)
        if not found:
            raise InputError(
                f"additive = {law!r} is wrong for the first batch: the losses of single rows do not add up to that of "
                f"{rows_of(few)} rows. Say another one, or leave additive out: batches then stay whole"
            )
        self.shifted = found[0][1]

    def begin_step(self) -> None:
        """Called in each forward pass of the model. One without gradients is evaluation."""
        if not self.in_step and torch.is_grad_enabled():
            alone = self.run.accelerator is None and self.run.device.type == "cuda"
            if alone and (place := device_of(self.models[0]).type) != "cuda":
                what = f"the model is on the {place}, and the plan is for {self.run.plan.hardware.name}"
                move = "move it with model.to('cuda') before the optimizer is made"
                raise InputError(f"{what}: {move}, or hide the card with CUDA_VISIBLE_DEVICES=-1")
            self.in_step = True
            self.run.begin_step()

    def end_step(self) -> None:
        """Called after each update of the weights."""
        if not self.in_step:  # another optimizer has ended the step
            return
        if self.additive and not self.parts and self.run.step == 0:
            self.additive = None
            self.run.leave_out(
                dict.fromkeys(STEP_FIELDS, "your loop does not call micro_batches, accumulate or accumulate_batch")
            )
        self.run.last_step_batch = ScriptStep.of(self.run.step, self.parts)
        self.parts, self.in_step = [], False
        self.run.end_step(skipped=False)

    def close(self, error: BaseException | None = None) -> None:
        """Leave the process as it was before the plan, and say what splitting by length saved."""
        self.run.error = error
        self.stack.close()
        if self.additive and (line := self.run.token_line()):
            self.run.say(line)
        self.run.listener.on_end(self.run, DONE if error is None else str(error) or type(error).__name__)


def with_own_kernels(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """A `saved` state with the kernels of `optimizer` instead of those of the script that saved it."""
    groups = [
        group | {key: own[key] for key in ("fused", "foreach") if key in own}
        for group, own in zip(saved["param_groups"], optimizer.param_groups, strict=False)
    ]
    return {**saved, "param_groups": groups + saved["param_groups"][len(groups) :]}


def planned(
    profile: str, model: Any, rows: int, additive: str | None, plugins: Mapping[str, Any], strict: bool, **script: Any
) -> ScriptPlan:
    """The plan for a loop with steps of `rows` rows. Raises InputError for a model that is wrapped, or another `additive`."""
    refuse_other_laws(additive)
    refuse_prepared(model)
    if not isinstance(rows, Integral) or rows < 1:
        raise InputError(f"rows: expected the number of rows of an optimizer step, got {truncate(rows)}")
    if additive and (problem := rows_meet(model)):
        raise InputError(f"additive = {additive!r}: {problem}, so a batch cannot be split; leave additive out")
    lacks = ({} if additive else dict.fromkeys(STEP_FIELDS, NOT_ADDITIVE)) | SCRIPT_LACKS | script.pop("lacks", {})
    return plan_for(model, profile, Script(rows, rows, {}, lacks=lacks, **script), plugins, strict)


def session(
    profile: str,
    model: Any,
    *,
    rows: int,
    additive: str | None = None,
    strict: bool = False,
    listener: Listener | None = None,
    **plugins: Any,
) -> Session:
    """A block with the plan of `profile` for `model` and a loop whose steps have `rows` rows.

    `additive`: how the loss of a batch adds up from its rows: "rows" (a mean over rows), "labels" (a mean over labels that are
    not -100) or "sum"; None: batches stay whole. With `strict`, an error for each plugin that is not applied. `plugins`:
    plugin -> its options, or False to leave it out. fp16 is left to loops with a loss scaler: see `hwopt.Accelerator`.
    """
    rank, ranks = rank_and_world(os.environ)
    if torch.distributed.is_initialized():
        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if additive and ranks > 1:
        raise InputError(
            f"additive = {additive!r} on {ranks} ranks: they would split a batch into other numbers of micro-batches, and each "
            "backward pass reduces gradients. Leave additive out, so that batches stay whole, or take hwopt.Accelerator"
        )
    precision = planned(profile, model, rows, None, plugins, strict=False).plan.recipe.accelerator.get("mixed_precision")
    fp16 = "a bare loop has no loss scaler, which fp16 needs; hwopt.Accelerator has one"
    lacks = {"accelerator['mixed_precision']": fp16} if precision == "fp16" else {}
    return Session(
        planned(profile, model, rows, additive, plugins, strict, lacks=lacks), model, additive, with_lines(listener), rank
    )
