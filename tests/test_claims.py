"""The figures of benchmarks/claims: their profiles and notes exist, and docs/claims.md has a row for each."""

from pathlib import Path
from typing import Any

from programs import BENCHMARKS, program

from hwopt.config.profile_files import profile_files

CLAIMS: Any = program("claims")
NAMES = {*profile_files(), *(path.stem for path in (BENCHMARKS / "profiles").glob("*.toml"))}


def test_every_claim_names_profiles_and_a_note_and_is_on_the_page() -> None:
    claims = list(CLAIMS.read_claims())
    headings = (BENCHMARKS.parent / "docs" / "notes.md").read_text(encoding="utf-8").lower().splitlines()
    anchors = {line[3:].replace(",", "").replace(" ", "-") for line in headings if line.startswith("## ")}
    assert {claim.anchor for claim in claims} == anchors
    for claim in claims:
        assert {claim.profile, claim.against or claim.profile} <= NAMES, claim
        assert claim.range[0] <= claim.range[1], claim
    rows = Path(CLAIMS.DOCUMENT).read_text(encoding="utf-8").count("](notes.md#")
    assert rows == len(claims) == 124
