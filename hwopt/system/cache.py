"""The cache folder: tokenised data, model facts and memory traces, kept between runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """The cache folder: HWOPT_CACHE, else `hwopt` in the user's cache folder."""
    if given := os.environ.get("HWOPT_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hwopt"
