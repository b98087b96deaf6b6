"""Texts that a test compares with a file, and writes to it with HWOPT_UPDATE_GOLDEN=1."""

import os
from pathlib import Path


def check_golden(path: Path, made: str) -> None:
    if os.environ.get("HWOPT_UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(made, encoding="utf-8")
    assert made == path.read_text(encoding="utf-8"), f"run the same test with HWOPT_UPDATE_GOLDEN=1, which writes {path.name}"


def check_part(page: Path, begin: str, made: str, end: str) -> None:
    """The same for the part of a page between two marks."""
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    check_golden(page, before + begin + made + end + rest.partition(end)[2])
