"""Shared by all tests: nothing outside the test's own folder is written, and libraries' remarks are not errors of ours."""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Callable, Iterator

import pytest

from hwopt.cli.options import NOISY
from hwopt.system import signals

for _name in NOISY:
    logging.getLogger(_name).setLevel(logging.ERROR)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HWOPT_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    """A command line that is called in this process listens to signals until it ends; here the next test comes behind it."""
    before = {number: signal.getsignal(number) for number in signals.EXIT_CODES}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    signals._received.clear()


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
