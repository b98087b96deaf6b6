"""The cache folder: tokenised data, model facts and memory traces, kept between runs."""

from __future__ import annotations

import os
from pathlib import Path

from hwopt.errors import StorageError
from hwopt.system.paths import refuse_non_utf8


def cache_folder() -> Path:
    """The cache folder: HWOPT_CACHE, else `hwopt` in the user's cache folder."""
    if given := os.environ.get("HWOPT_CACHE"):
        refuse_non_utf8(given, "HWOPT_CACHE")
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hwopt"


def is_cached(file: Path) -> bool:
    """Whether `file` exists in the cache. Raises StorageError if the cache folder cannot be accessed."""
    try:
        return file.is_file()
    except OSError as error:
        raise StorageError(
            f"{file}: cannot access the cache ({error.strerror or error}); set HWOPT_CACHE to a folder that you can write to"
        ) from error
