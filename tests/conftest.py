"""Fixtures of all tests: a fixed environment, a cache of the session, restored signal handlers, hypothesis profiles."""

import gc
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import described_machine
import pytest
import surroundings
from hypothesis import settings

if not (ON_CARD := described_machine.on_card()):
    described_machine.install(guarded=True)  # before the first import of hwopt

from hwopt.cli.options import NOISY
from hwopt.memory.trace import tracing_process
from hwopt.system import signals

settings.register_profile("fast", deadline=None, max_examples=30, derandomize=True, print_blob=True)
settings.register_profile("soak", deadline=None, max_examples=400)
settings.load_profile("fast")  # --hypothesis-profile=soak replaces it

tracing_process.IDLE_SECONDS = 3600.0  # tests that trace are far apart, and the server's imports take seconds

for _name in NOISY:
    logging.getLogger(_name).setLevel(logging.ERROR)

PREPARED = ExitStack()
PREPARED.enter_context(surroundings.prepared(ON_CARD))  # before the conftest.py of a folder imports torch, which reads variables


def pytest_unconfigure() -> None:
    PREPARED.close()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark everything under tests/integration."""
    if "integration" in item.path.relative_to(Path(__file__).parent).parts:
        item.add_marker("integration")


@pytest.fixture
def real_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Detection asks the real machine: for its own tests, which assert only what holds on every machine."""
    described_machine.allow(monkeypatch)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """One cache for the session and all its workers: the same plan is traced once."""
    folder = tmp_path_factory.getbasetemp()
    monkeypatch.setenv("HWOPT_CACHE", str((folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "cache"))


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    """Restore Python's signal handlers before each test: the command line installs its own handlers in this process."""
    yield
    for number, handler in surroundings.HANDLERS.items():
        signal.signal(number, handler)
    signals._received.clear()


@pytest.fixture(scope="module", autouse=True)
def frozen_garbage() -> None:
    freeze_garbage()


@pytest.fixture(autouse=True)
def frozen_imports() -> None:
    """Again after a test that imported a library."""
    if len(sys.modules) > _frozen_modules + 100:
        freeze_garbage()


_frozen_modules = 0


def freeze_garbage() -> None:
    """Exclude existing objects (mostly modules) from garbage collection, which takes half the time of a tiny run otherwise."""
    global _frozen_modules
    gc.collect()
    gc.freeze()
    _frozen_modules = len(sys.modules)


@pytest.fixture(scope="session")
def figures() -> Callable[[str, str], None]:
    """A function that appends a measurement for docs/reliability.md to the file in HWOPT_FIGURES."""
    path = os.environ.get("HWOPT_FIGURES")

    def keep(what: str, figure: str) -> None:
        if path:
            with open(path, "a", encoding="utf-8") as file:
                file.write(json.dumps({"what": what, "figure": figure}) + "\n")

    return keep


@pytest.fixture(scope="module", autouse=True)
def counted(request: pytest.FixtureRequest, figures: Callable[[str, str], None]) -> Iterator[None]:
    """Write the FIGURE of a module (row of the table, text with {tests}) if all its tests pass."""
    failed = request.session.testsfailed
    yield
    what, text = getattr(request.module, "FIGURE", ("", ""))
    if what and request.session.testsfailed == failed:
        figures(what, text.format(tests=sum(item.path == request.path for item in request.session.items)))
