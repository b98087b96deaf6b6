"""Build the loaders of a run, which yield whole step batches, and turn a worker's failure into an error of hwopt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader

from hwopt.config.aliases import option_for
from hwopt.data.batches.collate import Collate, StepDataset, cut_in_order
from hwopt.data.batches.samplers import EvalSampler, StepSampler
from hwopt.data.batches.step_batch import StepBatch, Widths
from hwopt.data.stores.token_store import Store
from hwopt.errors import DataError, PluginError, StorageError, WorkerDiedError
from hwopt.system import signals
from hwopt.training import randomness
from hwopt.training.run import Run


def build_loaders(run: Run) -> None:
    """Set the run's loaders of step batches. `accelerator.prepare` would distribute these over the ranks and repeat samples."""
    recipe, prepared, sizes = run.recipe, run.prepared, run.batch
    collate = default_collate(run)(cut=recipe.cut or cut_in_order, max_rows=sizes.train)
    train = StepSampler(
        lengths=prepared.train.lengths,
        counts=prepared.train.counts if prepared.weights is None else prepared.weights,
        order=recipe.order or randomness.shuffled,
        seed=run.training.seed,
        rows=sizes.step,
        total_steps=run.total_steps,
        rank=run.rank,
        world_size=run.world_size,
        start=run.step,
        mixture=prepared.train.mixture,
    )
    if recipe.collate is not None:
        collate = recipe.collate(collate)
    run.train_loader = make_loader(run, StepDataset(prepared.train, collate, prepared.weights), train)
    if prepared.eval is not None:
        run.eval_loader = evaluation_loader(run, prepared.eval)


def evaluation_loader(run: Run, store: Store) -> DataLoader[StepBatch]:
    """A loader of every sample of `store` once, over all ranks."""
    collate = default_collate(run)(cut=cut_in_order, max_rows=run.batch.eval_rows())
    sampler = EvalSampler(store.lengths, store.counts, run.batch.eval_rows, collate.width, run.rank, run.world_size)
    return make_loader(run, StepDataset(store, collate), sampler)


def default_collate(run: Run) -> Callable[..., Collate]:
    """The constructor of the default collate for `run`; `cut` and `max_rows` are still to be given."""
    attention = getattr(getattr(run.inner_model, "config", None), "_attn_implementation", None)
    mask: Literal["attention_mask", "prebuilt_mask"] = "attention_mask"
    if run.plan.model.prebuilt_mask and attention == "sdpa":
        mask = "prebuilt_mask"
    return partial(
        run.task.collate(),
        pad_id=getattr(run.prepared.tokenizer, "pad_token_id", None) or 0,  # an image processor has none
        # a decoder needs no mask: with right padding, no token attends to the padding after it. Only load balancing counts tokens
        mask=None if run.plan.model.is_decoder and not run.plan.router_loss else mask,
        widths=Widths(run.batch.widths, run.batch.pad_to_multiple_of),
    )


def make_loader(run: Run, dataset: StepDataset, sampler: Any) -> DataLoader[StepBatch]:
    return DataLoader(
        dataset,
        sampler=sampler,
        batch_size=None,  # the sampler's items are whole steps
        worker_init_fn=signals.init_worker,
        generator=torch.Generator(),  # without it the loader draws from the global generator
        **dict(run.recipe.loader),
    )


def end_workers(*loaders: Any) -> None:
    """End the workers of `loaders` now: when the garbage collector ends them, torch waits ten seconds for each."""
    for loader in loaders:
        iterator = getattr(loader, "_iterator", None)  # kept by a loader with persistent workers
        if iterator is not None:
            iterator._shutdown_workers()


def batches_of(loader: Any) -> Iterator[StepBatch]:
    """The step batches of `loader`. Raises the error of a worker unchanged, or WorkerDiedError if a worker died."""
    try:
        yield from loader
    except (OSError, EOFError) as error:  # the worker was killed while it sent a batch
        if not loader.num_workers or "DataLoader worker" in str(error):
            raise
        option = option_for("num_workers")
        raise WorkerDiedError(f"a data-loading worker died: {error!r}. Try {option} = 0") from error
    except (DataError, PluginError, StorageError) as error:  # torch puts the worker's traceback before the message
        raise type(error)(str(error).rpartition(f"{type(error).__name__}: ")[2].strip()) from error
