"""The loaders of a run: they yield whole step batches, and say what became of their workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils.data import DataLoader

from hwopt.data.collate import Collate, StepDataset, as_is, cut_in_order
from hwopt.data.samplers import EvalSampler, StepSampler
from hwopt.data.step_batch import StepBatch, Widths
from hwopt.errors import PluginError, StorageError, WorkerDiedError
from hwopt.system import signals
from hwopt.training import randomness

if TYPE_CHECKING:
    from hwopt.training.run import Run


def build_loaders(run: Run) -> None:
    """Loaders that yield whole step batches. Never given to `accelerator.prepare`, which would deal them to ranks in turn."""
    recipe, prepared, sizes = run.recipe, run.prepared, run.batch
    padding = padding_of(run)
    cut = recipe.cut or cut_in_order
    padded = padding(cut=cut, max_rows=sizes.train)
    train = StepSampler(
        lengths=prepared.train.lengths,
        counts=prepared.train.counts,
        order=recipe.order or randomness.shuffled,
        seed=run.training.seed,
        rows=sizes.step,
        total_steps=run.total_steps,
        rank=run.rank,
        world_size=run.world_size,
        start=run.step,
    )
    collate = padded if recipe.collate is None else recipe.collate(padded)
    run.train_loader = make_loader(run, StepDataset(prepared.train, collate), train)
    if prepared.eval is not None:
        evaluation = EvalSampler(prepared.eval.lengths, prepared.eval.counts, sizes.eval, run.rank, run.world_size)
        run.eval_loader = make_loader(run, StepDataset(prepared.eval, padding(cut=cut_in_order, max_rows=sizes.eval)), evaluation)


def padding_of(run: Run) -> Callable[..., Collate]:
    """The default collate of `run`, without its cut and most rows."""
    attention = getattr(run.inner_model.config, "_attn_implementation", None)
    mask: Literal["attention_mask", "prebuilt_mask"] = "attention_mask"
    if run.plan.model.prebuilt_mask and attention == "sdpa":
        mask = "prebuilt_mask"
    return partial(
        Collate,
        pad_id=run.prepared.tokenizer.pad_token_id or 0,
        # right padding is never attended by what stands left of it
        mask=None if run.plan.model.is_decoder else mask,
        widths=Widths(run.batch.widths, run.batch.pad_to_multiple_of),
    )


def make_loader(run: Run, dataset: StepDataset, sampler: Any) -> DataLoader[StepBatch]:
    return DataLoader(
        dataset,
        sampler=sampler,
        batch_size=None,  # the sampler's items are whole steps
        worker_init_fn=signals.init_worker,
        collate_fn=as_is,
        generator=torch.Generator(),  # or the loader would draw from the global one
        **dict(run.recipe.loader),
    )


def batches_of(loader: Any) -> Iterator[StepBatch]:
    """What `loader` yields; what a worker raises comes as it is. Raises WorkerDiedError where one is gone."""
    try:
        yield from loader
    except (OSError, EOFError) as error:  # it was killed while it handed something over
        if not loader.num_workers or "DataLoader worker" in str(error):
            raise
        raise WorkerDiedError(f"a data-loading worker died: {error!r}. Try plugins.dataloader.workers = 0") from error
    except (PluginError, StorageError) as error:  # a worker's comes with the lines of its traceback
        raise type(error)(str(error).rpartition(f"{type(error).__name__}: ")[2].strip()) from error
