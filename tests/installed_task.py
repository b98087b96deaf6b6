"""Install a package for a test: modules, and the metadata of a distribution that registers tasks or plugins."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from hwopt.config import task_kinds


def write_metadata(folder: Path, name: str, entries: Mapping[str, Mapping[str, str]]) -> None:
    """Make `folder` one with an installed package. `entries`: group of entry points -> name -> module:class."""
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1.0\n")
    lines = [line for group, each in entries.items() for line in (f"[{group}]", *map(" = ".join, each.items()))]
    (metadata / "entry_points.txt").write_text("\n".join(lines))


@contextmanager
def installed(folder: Path, monkeypatch: pytest.MonkeyPatch, *sources: Path, **kinds: str) -> Iterator[None]:
    """A block in which the entry points `kinds` (kind -> module:class) are installed. `sources`: modules to copy to `folder`."""
    for source in sources:
        (folder / source.name).write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    write_metadata(folder, "some_tasks", {task_kinds.GROUP: {name.replace("_", "-"): each for name, each in kinds.items()}})
    monkeypatch.syspath_prepend(folder)
    forget()
    try:
        yield
    finally:
        forget()


def forget() -> None:
    """Read the installed entry points again."""
    task_kinds.installed_tasks.cache_clear()
    task_kinds.task_class.cache_clear()
