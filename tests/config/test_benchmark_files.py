"""The profiles of benchmarks use options that exist, so that their figures can be made again."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from documentation import ROOT

from hwopt.configs.translation import problem
from hwopt.plugin.registry import Registry

REGISTRY = Registry()
FILES = sorted(path for path in (ROOT / "benchmarks").rglob("*.toml") if "[plugins." in path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT / "benchmarks")))
def test_options_of_a_benchmark_exist(path: Path) -> None:
    tables = tomllib.loads(path.read_text(encoding="utf-8"))["plugins"]
    for name in tables.keys() & REGISTRY.names:
        table = {key: value for key, value in tables[name].items() if key not in ("enabled", "after")}
        assert not problem(REGISTRY.plugin(name).Options, ("plugins", name), table)
