"""Figures of documents and profiles hold for one version of torch: what its kernels allocate differs between versions."""

import re
from importlib.metadata import version
from pathlib import Path

import pytest

PINNED = re.search(r"^torch==(\d+\.\d+)", (Path(__file__).parents[1] / "constraints.txt").read_text(encoding="utf-8"), re.M)
assert PINNED is not None, "constraints.txt pins torch"
IS_PINNED = version("torch").startswith(f"{PINNED[1]}.")
REASON = f"the committed figures are those of torch {PINNED[1]} (constraints.txt), this is {version('torch')}"
with_pinned_torch = pytest.mark.skipif(not IS_PINNED, reason=REASON)
