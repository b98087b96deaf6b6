"""A Trainer's optimizer step, split by length where the law of its loss is known, and repeated if memory runs out."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import TrainerCallback

from hwopt.data.batches.collate import cut_in_order
from hwopt.data.batches.step_batch import Widths
from hwopt.distributed.forward_backward import ForwardBackward
from hwopt.hardware.cuda_memory import release_unused_memory
from hwopt.hosts.additivity import Additivity, Law, additivity_of, inner, shifts_labels, without_dropout
from hwopt.hosts.collated import (
    Batch,
    CollatedPart,
    as_pairs,
    ignores_rows,
    labels_in,
    micro_batches,
    on_host,
    rows_of,
    sent,
    unsliceable,
    why_not_padded,
)
from hwopt.hosts.limits import STEP_FIELDS, unknown_part
from hwopt.hosts.probe import adds_up, disturbed, is_rough, pad_id_of, probed_rows
from hwopt.hosts.script_run import ScriptRun, ScriptStep
from hwopt.hosts.whole_batch import loss_of_whole, set_rows
from hwopt.text import first_line, listing
from hwopt.training.accumulation import not_timed, weights_cast_once

ROW_MEANS = ("rewards/", "logps/", "mean_reward", "accuracy", "margin")
"""What TRL logs as a mean over the rows of a batch: names begin so."""
TOTAL = ("_total_train_tokens", "num_tokens")
"""What TRL counts since the start over all ranks: the attribute, and the name in its log."""
COUNT = "num_items_in_batch"
APART = "the losses of parts of the first batch do not add up to it"


class TrainerPasses(ForwardBackward):
    """`begin` names the step; each call then computes one of its micro-batches."""

    def __init__(self, trainer: Any, run: ScriptRun) -> None:
        super().__init__(run)
        self.trainer = trainer
        self.weight: float | Tensor = 1.0  # what the Trainer's loss of the present micro-batch is multiplied by
        self.on_device = torch.ones((), device=run.device)  # the weight, for passes that are recorded

    def begin(self, model: Any, training_step: Callable[[Any, Any], Tensor], count: Any) -> None:
        """`training_step(inputs, count)` is the Trainer's; `count`: the labels of the step, or None."""
        self.model, self.training_step, self.count = model, training_step, count

    def __call__(self, micro_batch: CollatedPart, first: bool, last: bool, mark_time: Callable[[str], None]) -> Tensor:
        with nullcontext() if last else self.trainer.accelerator.no_sync(model=self.model):
            return self.weighted(micro_batch.weight, sent(micro_batch.inputs, self.run.device), self.count)

    def tensors(self, micro_batch: Any) -> dict[str, Tensor]:
        found = sent(micro_batch.inputs, self.run.device)
        first = {name: found[name] for name in ("input_ids",) if name in found}  # its shape is that of the micro-batch
        return first | found | ({COUNT: self.count} if isinstance(self.count, Tensor) else {})

    def constants(self) -> Hashable:
        return int(self.trainer.current_gradient_accumulation_steps)

    def set_weight(self, micro_batch: Any) -> None:
        self.on_device.fill_(micro_batch.weight)

    def compute(self, tensors: dict[str, Tensor]) -> Tensor:
        return self.weighted(self.on_device, {name: tensors[name] for name in tensors if name != COUNT}, tensors.get(COUNT))

    def weighted(self, weight: float | Tensor, inputs: Any, count: Any) -> Tensor:
        """The detached loss of `inputs`; its gradients, times `weight`, are accumulated."""
        self.weight = weight
        try:
            return self.training_step(inputs, count)
        finally:
            self.weight = 1.0


class TrainerStep:
    """The batches of the present step of `trainer`. `compute_loss` is the Trainer's own; `additive`: what the user says."""

    def __init__(self, trainer: Any, run: ScriptRun, compute_loss: Callable[..., Any], additive: Law | None) -> None:
        self.trainer, self.run, self.compute_loss, self.additive = trainer, run, compute_loss, additive
        self.passes = TrainerPasses(trainer, run)
        self.widths = Widths()  # what micro-batches are padded to
        self.law = Additivity(None, "unknown before the first step")  # how the loss adds up
        self.batches: list[Batch] = []

    @property
    def is_split(self) -> bool:
        return self.law.law is not None

    def begin(self, batches: list[Batch], counted: bool) -> None:
        """`batches` are those of the next step; `counted`: their labels were counted for the model."""
        self.batches, self._counted, self._left = batches, counted, len(batches)

    def loss(self, model: Any, compute: Callable[..., Any], inputs: Any, count: Any) -> Any:
        """The loss of the step in the call for its last batch; nothing is computed in the calls before it.

        `compute(inputs, count)` is the Trainer's `training_step`. A step that is not split is computed batch by batch.
        """
        if self.run.forward_backward is None:  # the first step of a training
            self._find_law(model)
        self._left -= 1
        if not self.is_split:
            sizes = [(rows_of(each) or 1, 0) for each in ([inputs] if self._left else self.batches)]
            self.run.last_step_batch = ScriptStep(self.run.step, (), sizes, self._pinned)
            return loss_of_whole(self.trainer, compute, inputs, count, len(self.batches) == 1, self.law.reason)
        if self._left:
            return torch.zeros((), device=self.trainer.args.device)
        return self._whole_step(model, compute, count)

    def _find_law(self, model: Any) -> None:
        """Find how the loss adds up, confirm it on rows of the first step, and say it."""
        self.run.stop_observing()
        found = additivity_of(self.trainer, self._counted, self.additive)
        first = self.batches[0]
        rows = rows_of(as_pairs(first) if found.pairs else first) or 0
        # all ranks split their steps, or none does
        if found.law is not None and self._sums([float(rows == 0)])[0]:
            found = Additivity(None, f"{unsliceable(first)} of a batch may not have one entry for each row")
        doubt = self._doubt(model, first, found) if found.law is not None and rows >= 2 else ""
        if found.law is not None and self._sums([float(bool(doubt))])[0]:
            found = Additivity(None, f"{found.reason}, and yet {doubt or APART}")
        self.law, self.run.forward_backward = found, self.passes
        if self.is_split:
            self.run.say(f"a step is split by length: {found.reason}")
            self._wrap_passes(model)
            kinds: list[Any] = list(map(type, self.trainer.callback_handler.callbacks))
            if seeing := [kind.__name__ for kind in kinds if kind.on_substep_end is not TrainerCallback.on_substep_end]:
                self.run.say(f"on_substep_end of {listing(seeing)} sees no gradients: a step is computed in its last batch")
        else:
            self.run.leave_out(dict.fromkeys(STEP_FIELDS, f"a step is not split: {found.reason}"))
            set_rows(self.trainer, self.trainer._rows_at_once)
        self.run.take_prepared_steps()
        self.run.observe()  # with hooks in the model, which are not the user's

    def _wrap_passes(self, model: Any) -> None:
        """Find the widths of micro-batches. Let the plan's plugin wrap passes that are operators of the device alone."""
        run, wrap, widths = self.run, self.run.recipe.forward_backward, self.run.batch.widths
        if wrap is not None:
            if part := unknown_part(inner(model)) or ("additive is yours" if self.additive is not None else ""):
                run.leave_out({"forward_backward": f"{part}: the passes may do more than operators of the device"})
                widths = ()
            else:
                run.forward_backward = wrap(run, self.passes)
        elif widths and (why := why_not_padded(self.batches[0], self._pad_id)):
            run.leave_out({"batch['widths']": f"the batches have any width: {why}"})
            widths = ()
        self.widths = Widths(widths, run.batch.pad_to_multiple_of)

    def _sums(self, numbers: Sequence[float]) -> list[float]:
        """The sums of `numbers` over the ranks."""
        if self.run.world_size == 1 or not numbers:
            return list(numbers)
        device = self.trainer.args.device
        on_device = torch.tensor(numbers, dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
        summed: list[float] = self.trainer.accelerator.reduce(on_device, "sum").tolist()
        return summed

    def _gathering_nothing(self) -> AbstractContextManager[Any]:
        """TRL gathers what it logs in each call. Ranks make other numbers of calls, with other rows: they add up once a step."""
        if self.run.world_size == 1:
            return nullcontext()
        return mock.patch.multiple(self.trainer.accelerator, gather=own_values, gather_for_metrics=own_values)

    def _doubt(self, model: Any, batch: Batch, law: Any) -> str:
        """Why the loss of the first rows of `batch` is not that of single ones, without dropout and gradients; "" if it is."""
        trainer, counters = self.trainer, self._counters()
        few = probed_rows(batch, self._pad_id, law.pairs)
        rows = self._parts([few], law, cut_in_order, 1)
        count = torch.tensor(100, device=trainer.args.device) if self._counted else None

        def loss_of(inputs: Batch) -> float:
            return float(self.compute_loss(model, trainer._prepare_inputs(dict(inputs)), num_items_in_batch=count))

        losses: list[float] = []
        generators = torch.random.fork_rng(range(torch.cuda.device_count()))
        # evaluation may need more memory than a training step, which handles its own
        evaluating, moved, tolerant = without_dropout(model), disturbed(inner(model)), suppress(torch.OutOfMemoryError)
        with self._gathering_nothing(), torch.no_grad(), generators, evaluating, moved, tolerant:
            losses = [loss_of(inputs) for inputs in (few, *(part.inputs for part in rows))]
        release_unused_memory()
        vars(trainer).update(counters)
        if not losses:
            self.run.say("the probe ran out of memory: it is not checked that the losses of rows add up to that of their batch")
            return ""
        if not math.isfinite(losses[0]):
            return f"the loss of the first batch is {losses[0]}"
        weights, rough = [part.weight for part in rows], is_rough(trainer.accelerator.mixed_precision)
        return "" if adds_up(losses[0], losses[1:], weights, rough) else APART

    @property
    def _pad_id(self) -> int | None:
        """The token that pads the rows."""
        trainer = self.trainer
        tokenizers = (getattr(trainer.data_collator, "tokenizer", None), getattr(trainer, "processing_class", None))
        return pad_id_of(*tokenizers, getattr(inner(trainer.model), "config", None))

    def _parts(self, batches: list[Batch], law: Any, cut: Any, rows: int, halvings: int = 0) -> list[CollatedPart]:
        shifted = shifts_labels(self.trainer.model)
        how: Law = "labels" if law.law == "rows" and self.additive is None and ignores_rows(batches) else law.law
        return micro_batches(
            batches, how, cut, rows, halvings, pad_id=self._pad_id, shifted=shifted, pairs=law.pairs, widths=self.widths
        )

    def _whole_step(self, model: Any, compute: Callable[..., Any], count: Any) -> Any:
        """The loss of the step, detached; its gradients are accumulated. Again in smaller micro-batches if memory runs out."""
        run, batches = self.run, on_host(self.batches)
        cut, random_states = run.recipe.cut or cut_in_order, (torch.get_rng_state(), torch.cuda.get_rng_state_all())
        # a stream that ended within a step has left its gradients; a failed attempt adds to them
        left = [(each, each.grad.to("cpu", copy=True)) for each in run.engine.parameters if each.grad is not None]
        while True:
            parts = self._parts(batches, self.law, cut, run.batch.train, run.backoff.rung)
            counters = self._counters()
            try:
                with self._gathering_nothing():
                    total = self._accumulated(model, compute, parts, count, bool(left))
                break
            except torch.OutOfMemoryError as error:
                if run.world_size > 1:  # the other ranks wait in the reduction of gradients
                    raise
                reason = first_line(error)
            # after the except block: the exception's frames keep tensors alive
            vars(self.trainer).update(counters)
            torch.set_rng_state(random_states[0])
            torch.cuda.set_rng_state_all(random_states[1])
            run.make_smaller(inner(model).parameters(), sum(len(part.lengths) for part in parts), reason)
            for parameter, gradient in left:
                parameter.grad = gradient.to(parameter.device, copy=True)
        run.backoff.step_succeeded()
        changed = self._merge_metrics(counters, parts)
        if changed and not run.steps:
            run.say(f"logged as means over the rows of a step, unlike in the unmodified script: {', '.join(changed)}")
        run.last_step_batch = ScriptStep.of(run.step, parts, self._pinned, self.widths)
        return total

    def _accumulated(self, model: Any, compute: Callable[..., Any], parts: list[CollatedPart], count: Any, left: bool) -> Any:
        """The loss of the step, detached. `left`: there are gradients of an earlier one, and a graph starts from zero."""
        self.passes.begin(model, compute, count)
        total, passes = None, self.passes if left else self.run.forward_backward
        plain = passes is self.passes
        with weights_cast_once(inner(model), self.run.device) if plain and len(parts) > 1 else nullcontext():
            for number, part in enumerate(parts):
                loss = passes(part, number == 0, number == len(parts) - 1, not_timed)
                if part.weight:  # the mean over no label is not a number
                    own = loss if plain else loss.clone()  # the plan's passes may write each loss to the same memory
                    total = own if total is None else total + own
        return loss if total is None else total

    def _merge_metrics(self, before: Mapping[str, Any], parts: list[CollatedPart]) -> list[str]:
        """Log for each batch of the step what TRL logged for each micro-batch; `before`: its counters before the step.

        Returns the names whose values differ from the unmodified script's: means over tokens, least and greatest values.
        """
        trainer, law = self.trainer, self.law.law
        logged: dict[str, list[Any]] = getattr(trainer, "_metrics", {}).get("train", {})
        if not logged:
            return []
        old = before.get("_metrics", {}).get("train", {})
        new = {name: values[len(old.get(name, ())) :] for name, values in sorted(logged.items()) if name != TOTAL[1]}
        shares = [part.weight if law != "sum" else float(labels_in(part.inputs, True)) for part in parts]
        products = [  # not a number: a rank logged it otherwise
            sum(value * share for value, share in zip(values, shares, strict=True)) if len(values) == len(parts) else math.nan
            for values in new.values()
        ]
        tokens = getattr(trainer, TOTAL[0], 0) - before.get(TOTAL[0], 0)
        *sums, share, tokens = self._sums([*products, sum(shares), tokens])
        merged = {name: value / (share or 1) for name, value in zip(new, sums, strict=True) if not math.isnan(value)}
        for name, mean in merged.items():
            logged[name][len(logged[name]) - len(parts) :] = [mean] * len(self.batches)
        if TOTAL[1] in logged and TOTAL[0] in before:
            setattr(trainer, TOTAL[0], before[TOTAL[0]] + int(tokens))
            logged[TOTAL[1]] = [getattr(trainer, TOTAL[0])]
        return [name for name in merged if not (law == "rows" and name.startswith(ROW_MEANS))]

    def _counters(self) -> dict[str, Any]:
        """What a trainer counts and averages while it computes losses, such as TRL's tokens: a failed attempt must not count."""
        own = {name: value for name, value in vars(self.trainer).items() if type(value) in (int, float)}
        metrics = getattr(self.trainer, "_metrics", None)
        return own | ({"_metrics": copy.deepcopy(metrics)} if metrics is not None else {})

    @property
    def _pinned(self) -> bool:
        return bool(getattr(self.run.train_loader, "pin_memory", False)) and self.run.device.type != "cpu"


def own_values(values: Any, *args: Any, **options: Any) -> Any:
    """Accelerate's `gather` of this rank alone."""
    return values
