"""The number of lines may only shrink: what comes in pays by what goes out (docs/decisions/0022-lines-of-code.md)."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MOST = {("hwopt", "plugins"): 48_682, ("tests",): 35_372}


@pytest.mark.parametrize("folders", MOST, ids=" and ".join)
def test_no_more_lines_than_before(folders: tuple[str, ...]) -> None:
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    lines = sum(path.read_bytes().count(b"\n") for path in files)
    assert lines <= MOST[folders], "take out as many lines as you add, or raise MOST and say why in the commit"
