"""Data loading: workers, pinned memory and prefetching."""

from __future__ import annotations

from collections.abc import Iterator

from hwopt.configs.check.contract import TRAINERS, Facts, Finding, rule
from hwopt.configs.view import View

WORKERS, PIN, PREFETCH = "dataloader_num_workers", "dataloader_pin_memory", "dataloader_prefetch_factor"
PERSISTENT = "dataloader_persistent_workers"


def without_workers(view: View) -> bool:
    """Whether the file gives 0 workers, or none and so the trainer's default of 0."""
    return view.number(WORKERS) == 0 or (WORKERS not in view and not view.is_hwopt)


def needs_workers(view: View, word: str, what: str, why: str) -> Finding:
    """The finding that the setting `word`, which is `what`, needs workers."""
    return Finding(word, f"{view.spelled(word)} is {what}.", why, view.line(WORKERS, 2))


@rule(
    "workers-cores",
    "warning",
    words=(WORKERS,),
    needs=("cores",),
    source="notes.md#rtx-3070-48-rows: more workers load the CPU",
)
def workers_cores(view: View, facts: Facts) -> Iterator[Finding]:
    """More data-loading workers than CPU cores."""
    workers, ranks = view.number(WORKERS), view.ranks
    assert facts.cores is not None
    if workers is not None and workers * ranks > facts.cores:
        all_ranks = f" on {ranks} ranks" if ranks > 1 else ""
        yield Finding(
            WORKERS,
            f"{workers:g} workers{all_ranks} for {facts.cores} CPU cores.",
            "Workers that share a core with the training process delay its launches.",
            view.line(WORKERS, max(1, facts.cores // ranks - 1)),
        )


@rule("pin-without-workers", "information", words=(PIN,), source="torch, memory pinning")
def pin_without_workers(view: View, facts: Facts) -> Iterator[Finding]:
    """Pinned memory without workers."""
    if view.is_on(PIN) and view.number(WORKERS) == 0:
        why = "The training process then copies each batch into pinned memory itself, between two steps."
        yield needs_workers(view, PIN, "true with 0 workers", why)


@rule(
    "prefetch-without-workers",
    "error",
    words=(PREFETCH,),
    source="torch, DataLoader: prefetch_factor needs workers",
    tools=TRAINERS,
)
def prefetch_without_workers(view: View, facts: Facts) -> Iterator[Finding]:
    """A prefetch factor without workers."""
    if view.number(PREFETCH) is not None and without_workers(view):
        why = "The trainer stops: only workers prefetch, and the default is 0 workers."
        yield needs_workers(view, PREFETCH, f"{view.number(PREFETCH):g} without workers", why)


@rule(
    "persistent-without-workers",
    "error",
    words=(PERSISTENT,),
    source="torch, DataLoader: persistent_workers needs workers",
    tools=TRAINERS,
)
def persistent_without_workers(view: View, facts: Facts) -> Iterator[Finding]:
    """Persistent workers without workers."""
    if view.is_on(PERSISTENT) and without_workers(view):
        yield needs_workers(view, PERSISTENT, "true without workers", "The data loader stops: it has no worker to keep.")


@rule("workers-restarted", "information", words=(PERSISTENT,), source="notes.md#rtx-3070-64-rows: disable persistent workers")
def workers_restarted(view: View, facts: Facts) -> Iterator[Finding]:
    """Workers that are started again at each epoch."""
    if view.value(PERSISTENT) is False and view.number(WORKERS) != 0:
        yield Finding(
            PERSISTENT,
            f"{view.spelled(PERSISTENT)} is false.",
            "Each epoch starts new worker processes, which costs seconds. Turning it off makes no step faster.",
            view.line(PERSISTENT, True),
        )
