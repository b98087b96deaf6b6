"""Data parallel: every rank holds the whole model; gradients are reduced once a step, after every rank has computed its own.

DistributedDataParallel reduces inside the last backward pass, which cannot be retried: if a rank runs out of memory there, the
others wait without end. Here every rank first reports over a gloo group that its gradients are complete; until then it may retry.
The cost: the reduction does not overlap with the backward pass (docs/memory.md).
Source: Li et al. 2020, PyTorch Distributed (arXiv:2006.15704), for the buckets.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist
from torch import Tensor

from hwopt.distributed.engine import Engine, new_cpu_group
from hwopt.distributed.oom_backoff import OomBackoff
from hwopt.errors import DoesNotFitError, HwoptError, WorkerDiedError, exit_code_of
from hwopt.plugin.run_view import RunView

block_numbers = itertools.count()  # numbers of the blocks of `first_rank_first`, the same on all ranks
BUCKET_BYTES = 25 << 20  # the default of DistributedDataParallel


class DataParallelEngine(Engine):
    def __init__(self, run: RunView) -> None:
        super().__init__(run)
        self.trained = [p for p in run.inner_model.parameters() if p.requires_grad]
        self.buckets = list(make_buckets(self.trained, BUCKET_BYTES))
        self.cpu_group = new_cpu_group()
        self.oom_counts: dict[tuple[str, int], int] = {}
        """(training or evaluation, rank) -> out-of-memory errors that were reported."""
        self.has_gradient: Tensor | None = None
        """Whether each parameter has a gradient on any rank, (parameters,) int32; None before the first vote."""

    @contextmanager
    def synchronized(self, backoff: OomBackoff) -> Iterator[None]:
        """A block that each rank runs alone. After it all ranks have succeeded, or all raise their error or `error_of_rank`."""
        try:
            yield
        except Exception as error:
            code = DoesNotFitError.exit_code if isinstance(error, torch.OutOfMemoryError) else exit_code_of(error)
            with suppress(RuntimeError):  # the other ranks may be dead; this rank's error matters more
                self.vote(code, backoff)
            raise
        try:
            codes = self.vote(0, backoff)
        except RuntimeError as error:
            raise rank_died(error) from error
        for rank, code in enumerate(codes):
            if code:
                raise error_of_rank(code, rank)

    def vote(self, code: int, backoff: OomBackoff) -> list[int]:
        """The exit code of every rank (0: success). Also exchanges the back-off, and which parameters have a gradient."""
        has_gradient = (p.grad is not None for p in self.trained)
        own_vote = torch.tensor([code, backoff.oom_count, backoff.rung, *has_gradient], dtype=torch.int32)
        found = [torch.empty_like(own_vote) for _ in range(self.run.world_size)]
        dist.all_gather(found, own_vote, group=self.cpu_group)
        votes = torch.stack(found)  # (ranks, 3 + parameters)
        self.has_gradient = votes[:, 3:].amax(dim=0)
        for rank, (oom_count, rung) in enumerate(votes[:, 1:3].tolist()):
            before = self.oom_counts.get((backoff.what, rank), 0)
            self.oom_counts[backoff.what, rank] = oom_count
            if oom_count > before and rank != self.run.rank:  # only the first rank shows messages
                self.run.warn(backoff.retry_message(f"on rank {rank}", rung))
        codes: list[int] = votes[:, 0].tolist()
        return codes

    def update(self) -> None:
        self.reduce()
        super().update()

    def reduce(self) -> None:
        """Sum the gradients over all ranks; `backward` has weighted them. A parameter without gradient on all ranks gets none."""
        assert self.has_gradient is not None, "reduce() needs a vote"
        for parameter, on_any_rank in zip(self.trained, self.has_gradient.tolist(), strict=True):
            if on_any_rank and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for bucket in self.buckets:
            gradients = [p.grad for p in bucket if p.grad is not None]
            if len(gradients) == 1 and gradients[0].is_contiguous():
                dist.all_reduce(gradients[0])  # saves the copy of a large tensor, such as an embedding
            elif gradients:
                flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
                dist.all_reduce(flat)
                parts = flat.split([gradient.numel() for gradient in gradients])
                torch._foreach_copy_(gradients, [part.view_as(each) for part, each in zip(parts, gradients, strict=True)])


@contextmanager
def first_rank_first(rank: int, world_size: int) -> Iterator[None]:
    """Run the block on the first rank, then on the others. It may take any time; an NCCL barrier times out after ten minutes.

    Raises WorkerDiedError if the first rank died.
    """
    if world_size == 1:
        yield
        return
    store, done = dist.distributed_c10d._get_default_store(), f"hwopt/{next(block_numbers)}"
    try:
        while rank > 0 and not store.check([done]):
            time.sleep(0.05)  # in Python, so that signal handlers run
    except RuntimeError as error:
        raise rank_died(error) from error
    yield
    if rank == 0:
        store.set(done, "")


def rank_died(error: RuntimeError) -> WorkerDiedError:
    """The error to raise when torch reports that another rank does not answer."""
    return WorkerDiedError(f"another rank exited: see its output for the cause ({error})")


def error_of_rank(code: int, rank: int) -> HwoptError:
    """The error to raise because another `rank` failed with exit code `code`: it has the same exit code."""
    kinds = {kind.exit_code: kind for kind in HwoptError.__subclasses__()}
    error = kinds.get(code, WorkerDiedError)(f"rank {rank} ended with exit code {code}; see its own message")
    error.secondhand = True
    return error


def broadcast_weights(model: torch.nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Copy the first rank's parameters and buffers to all ranks of `group`."""
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.data, 0, group=group)


def make_buckets(tensors: Sequence[Tensor], max_bytes: int) -> Iterator[list[Tensor]]:
    """Split `tensors`, in order, into lists of one dtype and at most `max_bytes` bytes. A larger tensor gets its own list."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        bytes_ = tensor.numel() * tensor.element_size()
        if bucket and (size + bytes_ > max_bytes or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += bytes_
    if bucket:
        yield bucket
