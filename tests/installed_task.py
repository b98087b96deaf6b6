"""Install a task for a test: a module, and the metadata of a distribution that registers it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hwopt.config import task_kinds


@contextmanager
def installed(folder: Path, monkeypatch: pytest.MonkeyPatch, *sources: Path, **kinds: str) -> Iterator[None]:
    """A block in which the entry points `kinds` (kind -> module:class) are installed. `sources`: modules to copy to `folder`."""
    for source in sources:
        (folder / source.name).write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    metadata = folder / "some_tasks-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: some-tasks\nVersion: 1.0\n")
    entries = "".join(f"{kind.replace('_', '-')} = {value}\n" for kind, value in kinds.items())
    (metadata / "entry_points.txt").write_text(f"[{task_kinds.GROUP}]\n{entries}")
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
