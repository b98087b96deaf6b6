"""A user's own module, dataset, collator and loss as a task of hwopt's loop.

A micro-batch is collated once, in a worker, with random numbers that depend on its step, and sliced after an out-of-memory error:
random masks and augmentations stay, also in a resumed run.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from hwopt.config.task_kinds import TaskFacts
from hwopt.data.batches.collate import Collate
from hwopt.data.batches.step_batch import MicroBatch, Part, Step, StepBatch
from hwopt.errors import DataError, InputError
from hwopt.hosts.additivity import LAWS, Law, device_of, refuse_other_laws, shifts_labels, without_dropout
from hwopt.hosts.collated import labels_in, labels_of, lengths_of, rows_of, sliced
from hwopt.hosts.probe import PROBED_ROWS, disturbed, is_rough, laws_that_agree, pad_id_of, probed_rows
from hwopt.hosts.script_plan import transformers_model
from hwopt.tasks.base import Task
from hwopt.tasks.metrics import LossMetrics, over_ranks
from hwopt.tasks.model_builder import refuse_batch_statistics
from hwopt.tasks.prepared import Prepared
from hwopt.text import first_line, listing
from hwopt.training.randomness import mix

PADDING = "Pass a collate_fn that pads them to one length, such as transformers.DataCollatorWithPadding(tokenizer)"
MEANS = {"rows": "a mean over rows", "labels": "a mean over the labels that are not -100", "sum": "a sum over rows"}
"""Value of `additive` -> what it says of the loss of a batch."""
LOSSES = "loss=lambda outputs, batch: …, or from a forward() that takes the whole batch and returns a dict with 'loss'"


@contextmanager
def seeded(*place: int) -> Iterator[None]:
    """A block in which random, numpy and torch draw numbers that depend on `place` alone; afterwards they go on as before."""
    of_python, of_numpy, seed = random.getstate(), np.random.get_state(), mix(*place)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


class OwnStore:
    """The rows of a dataset, as `hwopt.data.stores.token_store.Store`; their content is read in the workers."""

    mixture = None

    def __init__(self, dataset: Any) -> None:
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise InputError(f"the dataset needs __len__ and __getitem__; {type(dataset).__name__} lacks one of them")
        if not len(dataset):
            raise DataError("the dataset is empty")
        self.dataset, self.counts, self.lengths = dataset, np.ones(len(dataset), np.int32), np.ones(len(dataset), np.int32)
        if isinstance(first := dataset[0], Mapping) and "input_ids" in first:
            self.lengths = np.array([max(1, len(dataset[index]["input_ids"])) for index in range(len(dataset))], np.int32)
        self.meta: dict[str, Any] = {}
        self.folder = Path(hashlib.sha256(self.lengths.tobytes()).hexdigest()[:16])

    def __len__(self) -> int:
        return len(self.dataset)

    def array(self, name: str) -> Any:
        raise KeyError(name)

    def row(self, index: int, epoch: int = 0) -> dict[str, Any]:
        return {"length": self.lengths[index], "read": partial(self.dataset.__getitem__, index)}


@dataclass(frozen=True)
class OwnBatch(StepBatch):
    """A step batch of what the user's collator made: "0.labels" is the buffer `labels` of the first part."""

    unread: frozenset[str] = frozenset()  # keys that `forward` does not take

    def _micro_batch(self, part: Part, begin: int, end: int, share: float) -> MicroBatch:
        first, last = part.first_row + begin, part.first_row + end
        own = f"{self.parts.index(part)}."
        batch = {key.removeprefix(own): value for key, value in self.buffers.items() if key.startswith(own)}
        if end - begin < part.rows:
            batch = sliced(batch, list(range(begin, end)), max(self.lengths[first:last]))
        inputs = {key: value for key, value in batch.items() if key not in self.unread}
        return MicroBatch(inputs, batch, sum(self.units[first:last]), last, share, self.samples[first])  # type: ignore[arg-type]


@dataclass(frozen=True)
class OwnCollate(Collate):
    """Makes a step batch with the user's collator, which is called once for each micro-batch of the first rung."""

    collate_fn: Callable[[list[Any]], Any] = field(default=torch.utils.data.default_collate)
    law: Law = "rows"
    shifted: bool = False
    unread: frozenset[str] = frozenset()
    seed: int = 0

    def __call__(self, step: Step, samples: Sequence[Mapping[str, Any]], counts: Sequence[float]) -> OwnBatch:
        groups = self.groups([int(sample["length"]) for sample in samples])
        buffers, parts, lengths, units = dict[str, torch.Tensor](), list[Part](), list[int](), list[float]()
        for number, group in enumerate(groups):
            with seeded(self.seed, step.index, step.samples[group[0]]):
                batch = collated(self.collate_fn, [samples[row]["read"]() for row in group])
            own = lengths_of(batch)
            parts.append(Part(0, len(lengths), len(group), max(own)))
            lengths += own
            units += map(float, labels_of(batch, self.shifted)) if self.law == "labels" else [1.0] * len(group)
            buffers |= {f"{number}.{key}": value for key, value in batch.items()}
        if self.law == "labels":
            step = replace(step, count=sum(units))
        elif self.law == "sum":
            step, units = replace(step, count=0), [1 / len(units)] * len(units)
        chosen = tuple(step.samples[row] for group in groups for row in group)
        return OwnBatch(step, buffers, tuple(parts), tuple(lengths), chosen, tuple(units), unread=self.unread)


def collated(collate_fn: Callable[[list[Any]], Any], samples: list[Any]) -> dict[str, torch.Tensor]:
    """The batch that `collate_fn` makes. Raises DataError unless it is a dict of tensors with an entry for each row."""
    rows = len(samples)
    try:
        batch = collate_fn(samples)
    except RuntimeError as error:
        if collate_fn is not torch.utils.data.default_collate:
            raise
        raise DataError(f"the rows of the dataset are of unequal size. {PADDING} ({first_line(error)})") from error
    expected = f"expected a dict of tensors with an entry for each of {rows} rows, got {type(batch).__name__}"
    if not isinstance(batch, Mapping):
        raise DataError(f"collate_fn: {expected}. Pass a collate_fn that returns a dict, or a dataset whose rows are dicts")
    if rows_of(batch) != rows:
        shapes = {key: tuple(getattr(value, "shape", ())) for key, value in batch.items()}
        hint = f". {PADDING}" if collate_fn is torch.utils.data.default_collate else ""
        raise DataError(f"collate_fn: {expected} {shapes}. Leave out what has no entry for each row{hint}")
    return dict(batch)


class OwnMetrics(LossMetrics):
    """The loss, and the mean over rows of what each function returns for a batch."""

    def __init__(self, device: Any, functions: Mapping[str, Callable[[Any, Any], torch.Tensor]]) -> None:
        super().__init__(device)
        self.functions = functions
        self._values = torch.zeros(1 + len(functions), dtype=torch.float64, device=device)  # rows, sum of each function

    def update(self, outputs: Any, targets: Any, summed_loss: torch.Tensor, count: int | torch.Tensor) -> None:
        """Add a micro-batch, after all functions have been called: if memory runs out in one, nothing is added."""
        rows = rows_of(targets) or 1
        added = torch.zeros_like(self._values)
        added[0] = rows
        for number, (name, function) in enumerate(self.functions.items(), 1):
            values = torch.as_tensor(function(outputs, targets))
            if values.shape != (rows,):
                raise InputError(f"metrics[{name!r}]: expected a value for each row, ({rows},), got {tuple(values.shape)}")
            added[number] = values.double().sum()
        super().update(outputs, targets, summed_loss, count)
        self._values += added

    def compute(self) -> dict[str, float]:
        """The loss and the mean of each function by name. Called on all ranks."""
        rows, *sums = (sum(values) for values in zip(*over_ranks(self._values.tolist()), strict=True))
        means = [value / rows if rows else math.nan for value in sums]
        return super().compute() | dict(zip(self.functions, means, strict=True))


class OwnTask(Task):
    """The user's parts as a task. `additive` says how the loss of a batch adds up from its rows."""

    default_metric = "eval_loss"
    pipeline_tag = "other"

    def __init__(
        self,
        model: torch.nn.Module,
        train_dataset: Any,
        eval_dataset: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        loss: Callable[[Any, Any], torch.Tensor] | None = None,
        metrics: Mapping[str, Callable[[Any, Any], torch.Tensor]] | None = None,
        additive: str | None = None,
        seed: int = 0,
    ) -> None:
        self.model, self.own_loss, self.functions = model, loss, dict(metrics or {})
        self.collate_fn = collate_fn or torch.utils.data.default_collate
        self.train_store = OwnStore(train_dataset)
        self.eval_store = None if eval_dataset is None else OwnStore(eval_dataset)
        tokens = bool(self.train_store.lengths.max() > 1)
        self.facts = TaskFacts("your module", "", inputs="tokens" if tokens else "images")  # type: ignore[misc]
        self.metric_directions = {"loss": False} | dict.fromkeys(self.functions, True)  # type: ignore[misc]
        self.shifted = loss is None and shifts_labels(model)
        self.seed = seed
        self.unread: frozenset[str] = frozenset()
        self.law: Law = self._confirmed(additive)

    def prepare(self, *unused: Any, **named: Any) -> Prepared:
        silent = SimpleNamespace(save_pretrained=lambda folder: None, pad_token_id=0)
        return Prepared(self.train_store, self.eval_store, silent)

    def load_config(self, job: Any) -> Any:
        return getattr(self.model, "config", None)

    def load_model(self, job: Any, config: Any, prepared: Prepared, model_kwargs: Mapping[str, Any]) -> torch.nn.Module:
        refuse_batch_statistics(self.model)
        own: Any = getattr(self.model, "config", None)
        if hasattr(own, "get_text_config") and getattr(own.get_text_config(), "output_router_logits", False):
            raise InputError(
                "model: its loss has the load-balancing loss of the router, which is not a sum over rows. "
                "Set model.config.output_router_logits = False to train without it"
            )
        return self.model

    def collate(self) -> Any:
        return partial(OwnCollate, **{name: getattr(self, name) for name in ("collate_fn", "law", "shifted", "unread", "seed")})

    def loss_of(self, outputs: Any, batch: Any) -> torch.Tensor:
        if self.own_loss is not None:
            found: Any = self.own_loss(outputs, batch)
        else:
            found = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
        if not isinstance(found, torch.Tensor) or found.numel() != 1:
            shown = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else f"{found!r:.80}"
            raise InputError(f"the loss is {shown}: expected a scalar tensor, from {LOSSES if self.own_loss is None else 'loss'}")
        return found

    def loss(self, outputs: Any, targets: Any) -> tuple[torch.Tensor, int | torch.Tensor]:
        """(loss summed over the rows or labels of the batch, their number)."""
        loss, rows = self.loss_of(outputs, targets).float(), rows_of(targets) or 1
        if self.law == "sum":
            return loss, rows
        count = rows if self.law == "rows" else labels_in(targets, self.shifted)
        return (loss * count if count else torch.nan_to_num(loss) * 0), count  # the mean over no label is not a number

    def training_loss(self, prepared: Prepared, device: Any) -> Any:
        return self.loss

    def metrics(self, prepared: Prepared, device: Any) -> OwnMetrics:
        return OwnMetrics(device, self.functions)

    def usage(self, where: str) -> str:
        return f"model.load_state_dict(safetensors.torch.load_file({where!r} + '/model.safetensors'))"

    def _confirmed(self, additive: str | None) -> Law:
        """`additive`, compared with the losses of single rows. Raises InputError if it is missing or wrong."""
        refuse_other_laws(additive)
        dataset = self.train_store.dataset
        rows = min(PROBED_ROWS, len(dataset))
        with seeded(self.seed):
            spread = [number * (len(dataset) - 1) // max(1, rows - 1) for number in range(rows)]  # sorted data differ only so
            batch = collated(self.collate_fn, [dataset[index] for index in spread])
        if additive == "labels" and "labels" not in batch:
            raise DataError('additive = "labels": the batches of collate_fn have no "labels"')
        taken = inspect.signature(self.model.forward).parameters
        starred = [key for key, each in taken.items() if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
        takes_all = any(taken[key].kind is inspect.Parameter.VAR_KEYWORD for key in starred)
        untaken = [key for key in batch if not (takes_all or key in taken)]
        if lacking := [key for key in taken if taken[key].default is inspect.Parameter.empty and key not in {*batch, *starred}]:
            where = f"{type(self.model).__name__}.forward() needs {lacking[0]!r}"
            raise InputError(f"{where}, and the batches of collate_fn have {listing(list(map(repr, batch)))}: give both one name")
        if self.own_loss is not None:
            self.unread = frozenset([*untaken, "labels"])
        elif untaken:
            where = f"{type(self.model).__name__}.forward() takes no {untaken[0]!r}"
            raise InputError(f"{where}: without loss= the model computes the loss. It comes from {LOSSES}")
        batch = {key: value.to(device_of(self.model)) for key, value in batch.items()}

        def loss_of(part: dict[str, Any]) -> float:
            return float(self.loss_of(self.model(**{key: part[key] for key in part if key not in self.unread}), part))

        known: list[tuple[Law, bool]] = [("rows", False), ("sum", False)]
        if "labels" in batch:
            known += [("labels", shifted) for shifted in ([self.shifted] if self.own_loss is None else [False, True])]
        with torch.no_grad(), seeded(self.seed), without_dropout(self.model), disturbed(self.model):
            few = probed_rows(batch, pad_id_of(getattr(transformers_model(self.model), "config", None)))
            near = dict(reversed(laws_that_agree(loss_of, few, known, is_rough())))
        seen = f" {rows} rows of your data agree with {listing([repr(law) for law in LAWS if law in near])}." if near else ""
        if additive is None:
            raise InputError(
                f"hwopt must know how the loss of a batch adds up from its rows. Say additive = "
                f"{', '.join(f'{law!r} ({MEANS[law]})' for law in MEANS)}.{seen} If it is none of them, such as a loss over "
                "pairs of rows, a step cannot be split, and this loop cannot train it"
            )
        law = cast("Law", additive)
        if law not in near:
            raise InputError(
                f"additive = {law!r} ({MEANS[law]}) is wrong for {rows} rows of your data: their losses do not add up.{seen}"
            )
        self.shifted = near[law]
        return law
