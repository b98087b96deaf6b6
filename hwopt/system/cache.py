"""Where tokenised data, model facts and traces are kept between runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from hwopt.errors import StorageError
from hwopt.system.paths import refuse_non_utf8


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Where tokenised data and model facts are kept: HWOPT_CACHE, else hwopt under the user's cache folder."""
    if given := environment.get("HWOPT_CACHE"):
        refuse_non_utf8(given, "HWOPT_CACHE")
        return Path(given)
    return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hwopt"


def is_cached(file: Path) -> bool:
    """Whether a file lies in the cache. Raises StorageError where nobody may look: nothing could be put there either."""
    try:
        return file.is_file()
    except OSError as error:
        raise StorageError(
            f"{file}: the cache cannot be looked at ({error.strerror or error}); set HWOPT_CACHE to a folder of your own"
        ) from error
