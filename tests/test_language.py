"""Words that the project does not use, in code, messages and documents."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BANNED = {
    r"(?<!here )\b(is|was) no (?!longer|larger|more\b|better|worse|faster|slower|sooner|one\b)\w+": 'say "is not a …"',
    r"leads? nowhere": 'say "broken symlink"',
    r"\bonce said\b": "cite what a reader can open",
}


@pytest.mark.parametrize(("pattern", "instead"), BANNED.items())
def test_words_that_are_not_used(pattern: str, instead: str) -> None:
    files = [*ROOT.glob("hwopt/**/*.py"), *ROOT.glob("plugins/**/*.py"), *ROOT.glob("docs/*.md"), ROOT / "README.md"]
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in files
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(pattern, line)
    ]
    assert found == [], instead


def test_glossary_names_places_that_exist() -> None:
    rows = re.findall(r"^\| .+ \| `(.+)` \|$", (ROOT / "docs/glossary.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) > 20
    assert [place for place in rows if not (ROOT / place).exists()] == []
