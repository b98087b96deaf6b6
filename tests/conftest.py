"""What all tests share: known surroundings, a cache of the session, signal handlers restored, hypothesis profiles."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import surroundings
from hypothesis import settings

from hwopt.cli.options import NOISY
from hwopt.system import signals

settings.register_profile("fast", deadline=None, max_examples=30, derandomize=True, print_blob=True)
settings.register_profile("soak", deadline=None, max_examples=400)
settings.load_profile("fast")  # --hypothesis-profile=soak takes its place

for _name in NOISY:
    logging.getLogger(_name).setLevel(logging.ERROR)

PREPARED = pytest.StashKey[ExitStack]()


def pytest_configure(config: pytest.Config) -> None:
    """Prepare the surroundings before a test module is collected: torch reads some variables when it is imported."""
    config.stash[PREPARED] = stack = ExitStack()
    stack.enter_context(surroundings.prepared())


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[PREPARED].close()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark everything under tests/integration."""
    if "integration" in item.path.relative_to(Path(__file__).parent).parts:
        item.add_marker("integration")


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HWOPT_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    """Each test starts with Python's own handlers: a command line that is called in this process installs its handlers."""
    yield
    for number, handler in surroundings.HANDLERS.items():
        signal.signal(number, handler)
    signals._received.clear()


@pytest.fixture(scope="module", autouse=True)
def frozen_garbage() -> None:
    """Take what lives so far (modules, above all) out of the collections that every run makes: they were half of its seconds."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def figures() -> Callable[[str, str], None]:
    """Keeps what a test has measured, for docs/reliability.md: one line of the file that HWOPT_FIGURES names."""
    path = os.environ.get("HWOPT_FIGURES")

    def keep(what: str, figure: str) -> None:
        if path:
            with open(path, "a", encoding="utf-8") as file:
                file.write(json.dumps({"what": what, "figure": figure}) + "\n")

    return keep


@pytest.fixture(scope="module", autouse=True)
def counted(request: pytest.FixtureRequest, figures: Callable[[str, str], None]) -> Iterator[None]:
    """A module that has a FIGURE (row of the table, text with {tests}) is counted in it where all of its tests pass."""
    failed = request.session.testsfailed
    yield
    what, text = getattr(request.module, "FIGURE", ("", ""))
    if what and request.session.testsfailed == failed:
        figures(what, text.format(tests=sum(item.path == request.path for item in request.session.items)))
