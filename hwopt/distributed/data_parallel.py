"""Data parallel: every rank holds the whole model, and gradients meet once a step, after each rank has all of its own.

torch's DistributedDataParallel reduces inside the last backward, and cannot be asked again once that has failed: a rank that runs
out of memory there leaves the others waiting for ever. Here nothing is reduced until every rank has said, over a group of the
hosts, that its gradients are whole; until then it may drop them and begin again. A rank that gives up says so too, and all end.
It costs the overlap of reduction and backward, which nobody has measured here yet (docs/memory.md).
Source: Li et al. 2020, PyTorch Distributed (arXiv:2006.15704), for the buckets.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from hwopt.distributed.engine import Engine
from hwopt.distributed.oom_backoff import OomBackoff
from hwopt.errors import DoesNotFitError, HwoptError, WorkerDiedError, exit_code_of

if TYPE_CHECKING:
    from hwopt.plugin.run_view import RunView


turns = itertools.count()
"""Each block of `first_rank_first` has a name of its own, the same on all ranks."""
BUCKET_BYTES = 25 << 20
"""As DistributedDataParallel has it."""


class DataParallelEngine(Engine):
    def __init__(self, run: RunView) -> None:
        super().__init__(run)
        self.reduced = [p for p in run.inner_model.parameters() if p.requires_grad]
        self.buckets = list(make_buckets(self.reduced, BUCKET_BYTES))
        self.cpu_group = dist.new_group(backend="gloo")
        self.heard: dict[tuple[str, int], int] = {}  # (training or evaluation, rank) -> how often it ran out, as last told
        self.present: Tensor | None = None

    @contextmanager
    def synchronized(self, backoff: OomBackoff) -> Iterator[None]:
        """What a rank does alone inside the block; behind it all have done it, or all end.

        Raises what went wrong here, else the error that another rank ends with.
        """
        try:
            yield
        except Exception as error:
            code = DoesNotFitError.exit_code if isinstance(error, torch.OutOfMemoryError) else exit_code_of(error)
            with suppress(RuntimeError):  # the others may be gone; what went wrong here matters more
                self.vote(code, backoff)
            raise
        try:
            codes = self.vote(0, backoff)
        except RuntimeError as error:
            raise WorkerDiedError(f"another rank is gone, its own output says why ({error})") from error
        for rank, code in enumerate(codes):
            if code:
                raise error_of_rank(code, rank)

    def vote(self, code: int, backoff: OomBackoff) -> list[int]:
        """Exchange exit codes (0: all is well), ladders, and which parameters have a gradient anywhere. Waits for all ranks."""
        mine = torch.tensor(
            [code, backoff.oom_count, backoff.rung, *(p.grad is not None for p in self.reduced)], dtype=torch.int32
        )
        votes = [torch.empty_like(mine) for _ in range(self.run.world_size)]
        dist.all_gather(votes, mine, group=self.cpu_group)
        self.present = torch.stack(votes)[:, 3:].amax(dim=0)
        for rank, vote in enumerate(votes):
            self.hear(backoff, rank, int(vote[1]), int(vote[2]))
        return [int(vote[0]) for vote in votes]

    def hear(self, backoff: OomBackoff, rank: int, times: int, rung: int) -> None:
        """Say what another rank cannot: only the first one speaks."""
        before = self.heard.get((backoff.what, rank), 0)
        self.heard[backoff.what, rank] = times
        if times > before and rank != self.run.rank:
            self.run.warn(
                f"rank {rank} ran out of memory in {backoff.what.lower()}: it goes on with the same rows in micro-batches of "
                f"1/{2**rung} of the rows (slower, the same result; to start so, lower {backoff.option})"
            )

    def finish(self) -> None:
        self.reduce()
        super().finish()

    def reduce(self) -> None:
        """Add up the ranks' gradients; a parameter without one anywhere stays without. Each weighs by its share already."""
        assert self.present is not None, "the ranks have voted"
        for parameter, somewhere in zip(self.reduced, self.present.tolist(), strict=True):
            if somewhere and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for bucket in self.buckets:
            gradients = [p.grad for p in bucket if p.grad is not None]
            if not gradients:
                continue
            if len(gradients) == 1 and gradients[0].is_contiguous():
                dist.all_reduce(gradients[0])  # an embedding, say: no copy of it is needed
                continue
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            dist.all_reduce(flat)
            parts = flat.split([gradient.numel() for gradient in gradients])
            torch._foreach_copy_(gradients, [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)])


@contextmanager
def first_rank_first(rank: int, world_size: int) -> Iterator[None]:
    """The first rank does the block, then the others do. However long it takes: a barrier of NCCL gives up after ten minutes.

    Raises WorkerDiedError where the first rank is gone.
    """
    if world_size == 1:
        yield
        return
    store, done = dist.distributed_c10d._get_default_store(), f"hwopt/{next(turns)}"
    try:
        while rank > 0 and not store.check([done]):
            time.sleep(0.05)  # in Python, so that signals are heard
    except RuntimeError as error:
        raise WorkerDiedError(f"another rank is gone, its own output says why ({error})") from error
    yield
    if rank == 0:
        store.set(done, "")


def error_of_rank(code: int, rank: int) -> HwoptError:
    """The error of a rank that did not fail itself: the same exit code."""
    kinds = {kind.exit_code: kind for kind in HwoptError.__subclasses__()}
    error = kinds.get(code, WorkerDiedError)(f"rank {rank} ended with exit code {code}; its own message says why")
    error.secondhand = True
    return error


def broadcast_weights(model: torch.nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """The first rank's weights on all ranks: whatever made them differ must not stay."""
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.data, 0, group=group)


def make_buckets(tensors: Sequence[Tensor], most: int) -> Iterator[list[Tensor]]:
    """`tensors` in order, in lists of one dtype of at most `most` bytes; a larger tensor is alone."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        bytes_ = tensor.numel() * tensor.element_size()
        if bucket and (size + bytes_ > most or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += bytes_
    if bucket:
        yield bucket
