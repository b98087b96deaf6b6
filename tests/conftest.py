"""Shared by all tests: nothing outside the test's own folder is written, and libraries' remarks are not errors of ours."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable

import pytest

from hwopt.cli.options import NOISY

for _name in NOISY:
    logging.getLogger(_name).setLevel(logging.ERROR)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HWOPT_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def figures() -> Callable[[str, str], None]:
    """Keeps what a test has measured, for docs/reliability.md: one line of the file that HWOPT_FIGURES names."""
    path = os.environ.get("HWOPT_FIGURES")

    def keep(what: str, figure: str) -> None:
        if path:
            with open(path, "a", encoding="utf-8") as file:
                file.write(json.dumps({"what": what, "figure": figure}) + "\n")

    return keep
