"""Mutations: changes to a library after which an optimization has no effect. The evidence of its plugin must turn inactive.

Each plugin has at least one. A mutation patches what the plugin calls (torch, transformers, bitsandbytes, PEFT, DeepSpeed, or
hwopt's own function if there is no library), never the plugin's evidence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from integration.forks import in_fork

from hwopt.plugin import Evidence
from hwopt.testing import plan_for, tiny_job, tiny_profile, train_tiny

Patch = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Mutation:
    """A plugin with options, in a tiny run, and the change to a library after which it has no effect."""

    plugin: str
    what: str
    """What the library does not do any more."""
    patch: Patch
    says: str
    """A part of the evidence's text."""
    options: Mapping[str, Any] = field(default_factory=dict)
    beside: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Tables of other plugins."""
    kind: str = "text-classification"
    job: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of `tiny_job`."""
    compiles: bool = False
    """Whether the runs compile code, which takes half a minute."""

    def __str__(self) -> str:
        return f"{self.plugin}: {self.what}"

    def evidence(self, folder: Path) -> Evidence:
        """The evidence of the plugin after the first step of a tiny run in `folder`."""
        job = tiny_job(folder / "data", self.kind, **{"max_steps": 1, **self.job})
        plan = plan_for(tiny_profile(**self.beside, **{self.plugin: self.options}), job)
        recorder = train_tiny(plan, folder)
        return next(evidence for entry, evidence in recorder.found if entry.name == self.plugin)


def parameters(mutations: Iterable[Mutation]) -> list[Any]:
    """The parameters of a test: those that compile code are integration tests."""
    return [
        pytest.param(mutation, id=str(mutation), marks=pytest.mark.integration if mutation.compiles else ())
        for mutation in mutations
    ]


def check(mutation: Mutation, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Assert that the evidence is active, and inactive with the mutation."""
    work = partial(_check, mutation, folder, monkeypatch)
    if mutation.compiles:
        in_fork(work, folder / "output")
    else:
        work()


def _check(mutation: Mutation, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = mutation.evidence(folder / "before")
    assert before.status == "active", before.seen
    with monkeypatch.context() as patched:
        mutation.patch(patched)
        after = mutation.evidence(folder / "after")
    assert after.status == "inactive", after.seen
    assert mutation.says in after.seen
