"""What the common tests know of a plugin: the constant CASES of its own test file, tests/plugins/test_NAME.py."""

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import DAILY
from integration.forks import in_fork

from hwopt.hardware.device import Hardware
from hwopt.plugin import Evidence
from hwopt.plugin.registry import Registry
from hwopt.testing import plan_for, tiny_job, tiny_profile, train_tiny

FOLDER = Path(__file__).parent / "plugins"
LAYERS = 4
"""Layers of the model of a `Part`."""
Chosen = Callable[[int], bool]
"""Whether a `Part` patches the module of this number."""


@dataclass(frozen=True)
class Mutation:
    """A change to a library after which the plugin has no effect in a tiny run: its evidence must turn inactive.

    It patches what the plugin calls (torch, transformers, bitsandbytes, PEFT, DeepSpeed, or hwopt's own function if there is no
    library), never the plugin's evidence.
    """

    what: str
    """What the library does not do any more."""
    patch: Callable[[pytest.MonkeyPatch], None]
    says: str
    """A part of the evidence's text."""
    options: Mapping[str, Any] = field(default_factory=dict)
    job: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of `tiny_job`."""
    compiles: bool = False
    """Whether the runs compile code, which takes half a minute."""
    on_cuda: bool = False
    """Whether the plugin needs a CUDA device, real or pretend. tests/gpu runs it."""


@dataclass(frozen=True)
class Part:
    """A change to a library after which the plugin has no effect on the modules, or other parts, that `patch` gets chosen."""

    what: str
    patch: Callable[[pytest.MonkeyPatch, Chosen], None]
    options: Mapping[str, Any] = field(default_factory=dict)
    later: Callable[[Any], None] = lambda run: None
    """Ends the effect for half of the modules, or other parts, of a run that goes on."""


@dataclass(frozen=True)
class Refused:
    """Tables of a profile that a conflict of the plugin refuses, and the other plugin."""

    other: str
    tables: str
    world_size: int = 2
    on_card: bool = False
    """Whether a CPU would skip or replace what the tables ask for."""
    software: Mapping[str, str] = field(default_factory=dict)
    """Packages that the machine seems to have: name -> version."""


@dataclass(frozen=True)
class Cases:
    """What the common tests need to know of a plugin."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """For a plugin whose defaults have no visible effect."""
    kind: str = "text-classification"
    """Another task, for a plugin that skips a classification."""
    beside: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The tables of plugins that it needs."""
    writes: frozenset[str] | None = None
    """The recipe fields that it writes with its default options."""
    hardware: Hardware | None = None
    """Hardware on which the plugin applies, if some machines cannot run it."""
    pretend: bool = True
    """Whether a pretend card computes the same as the plugin's kernels."""
    invalid: tuple[tuple[Mapping[str, Any], str], ...] = ()
    """(options that the plugin's own validators refuse, a part of the message)."""
    conflicts: tuple[Refused, ...] = ()
    mutations: tuple[Mutation, ...] = ()
    mutations_in: str = ""
    """A file of tests/integration with the mutations, in `test_evidence_of_NAME_...`, if they need several ranks."""
    parts: tuple[Part, ...] = ()
    whole: str = ""
    """Why there are no `parts`: the effect of the plugin has none, or other tests of the same file end it in some."""


@cache
def cases(name: str) -> Cases:
    """CASES of tests/plugins/test_NAME.py."""
    path = FOLDER / f"test_{name}.py"
    assert path.is_file(), f"the plugin {name!r} has no tests: write {path}"
    spec = spec_from_file_location(f"cases_of_{name}", path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    found = getattr(module, "CASES", None)
    assert isinstance(found, Cases), f"{path} has no constant CASES = Cases(…), see tests/plugin_cases.py"
    return found


def all_cases() -> dict[str, Cases]:
    """Name -> cases, for every built-in plugin."""
    return {name: cases(name) for name in Registry().names}


def mutations(on_cuda: bool = False) -> list[Any]:
    """(name of a plugin, mutation), as parameters of a test: those that compile code are daily integration tests."""
    return [
        pytest.param(name, each, id=f"{name}: {each.what}", marks=DAILY if each.compiles else ())
        for name, its in all_cases().items()
        for each in its.mutations
        if each.on_cuda == on_cuda
    ]


def check_mutation(name: str, mutation: Mutation, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Assert that the evidence of the plugin `name` is inactive with the mutation, and active without."""
    work = partial(_check, name, mutation, folder, monkeypatch)
    if mutation.compiles:
        torch._dynamo.reset()  # a fork has the code that this process compiled
        in_fork(work, folder / "output")
    else:
        work()


def _check(name: str, mutation: Mutation, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if mutation.job or dict(mutation.options) != dict(cases(name).options):  # else the contract test asserts the same
        before = evidence(name, mutation, folder / "before")
        assert before.status == "active", before.seen
    with monkeypatch.context() as patched:
        mutation.patch(patched)
        after = evidence(name, mutation, folder / "after")
    assert after.status == "inactive", after.seen
    assert mutation.says in after.seen


def evidence(name: str, mutation: Mutation, folder: Path) -> Evidence:
    """The evidence of the plugin `name` after the first step of a tiny run in `folder`."""
    its = cases(name)
    job = tiny_job(folder / "data", its.kind, **{"max_steps": 1, **mutation.job})
    recorder = train_tiny(plan_for(tiny_profile(**its.beside, **{name: mutation.options}), job), folder)
    return next(found for entry, found in recorder.found if entry.name == name)


def release_memory() -> None:
    """Return the memory of this process to the CUDA device, with cuBLAS's workspaces."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
