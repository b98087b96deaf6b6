"""Claims: the verdict on a figure, how the shipped profiles state them, and their page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pinned_torch import with_pinned_torch

from hwopt.config.claim import Claim
from hwopt.config.profile import make_profile
from hwopt.config.toml import Document
from hwopt.errors import InputError
from hwopt.memory.claims import Forecast, Found, judge, profiles_with_claims
from hwopt.planning.inputs import Inputs
from hwopt.report.claims import cells, markdown, show_range

INPUTS = Inputs()
CLAIMS = [(name, claim) for name in profiles_with_claims(INPUTS) for claim in INPUTS.profile(name).content.claims]
PAGE = Path(__file__).parents[2] / "docs" / "claims.md"
SOURCES = ("000", "001", "002", "003", "004")


def claim_of(what: str, *expect: float, **more: Any) -> Claim:
    return Claim(what=what, expect=expect, source="here", **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("claim", "low", "high", "verdict"),
    [
        (claim_of("samples_per_second", 3.9, 4.0, against="before"), 0.93, 1.05, "refuted"),
        (claim_of("samples_per_second", 3.9, 4.0, against="before"), 2.0, 3.9, "confirmed"),
        (claim_of("samples_per_second", 100), 160, 320, "confirmed"),
        (claim_of("samples_per_second", 100), 60, 99, "refuted"),
        (claim_of("peak_memory_gib", 3.5, 4.0), 3.3, 3.3, "confirmed"),  # 7 % more is 3.53
        (claim_of("peak_memory_gib", 3.5, 4.0), 3.2, 3.2, "refuted"),
        (claim_of("peak_memory_gib", 1.4, 2.0, against="before"), 1.35, 1.35, "refuted"),
        (claim_of("rows_per_step", 80, 80), 80, 80, "confirmed"),
        (claim_of("states_gib", 1.5, 1.5), 1.63, 1.63, "refuted"),
    ],
)
def test_verdict_compares_the_two_ranges(claim: Claim, low: float, high: float, verdict: str) -> None:
    assert judge("p", claim, Found(low, high, "predicted", "a card")).verdict == verdict


def test_measured_memory_has_no_forecast_error() -> None:
    claim = claim_of("peak_memory_gib", 3.5, 4.0)
    assert judge("p", claim, Found(3.4, 3.4, "predicted", "")).verdict == "confirmed"
    assert judge("p", claim, Found(3.4, 3.4, "measured", "")).verdict == "refuted"


def test_claim_without_a_figure_is_not_measurable() -> None:
    finding = judge("p", claim_of("eval_f1", 0.91, 0.92), None, "no data")
    assert (finding.verdict, finding.explanation) == ("not measurable here", "no data")
    assert cells(finding)[3] == "-"


@pytest.mark.parametrize(
    ("claim", "shown"),
    [
        (claim_of("epoch_seconds", 1800, 2100), "30 to 35 min"),
        (claim_of("total_seconds", 43_200, 54_000), "12 to 15 h"),
        (claim_of("peak_memory_gib", 11.65), "at least 11.65 GiB"),
        (claim_of("samples_per_second", 1.1, 1.15, against="before"), "x1.10 to x1.15"),
        (claim_of("gpu_utilization", 92, 97), "92 to 97 %"),
        (claim_of("samples_per_second", 160, 160), "160"),
    ],
)
def test_range_is_shown_in_the_unit_of_the_quantity(claim: Claim, shown: str) -> None:
    assert show_range(claim, claim.low, claim.high) == shown


@pytest.mark.parametrize(
    ("claim", "problem"),
    [
        ({"what": "speed", "expect": [1, 2], "source": "x"}, "claims.0.what"),
        ({"what": "eval_f1", "expect": [2, 1], "source": "x"}, "the lowest value comes first"),
        ({"what": "eval_f1", "expect": [], "source": "x"}, "claims.0.expect"),
        ({"what": "eval_f1", "expect": [1, 2, 3], "source": "x"}, "claims.0.expect"),
        ({"what": "eval_f1", "expect": [1]}, "claims.0.source"),
        ({"what": "eval_f1", "expect": [1], "source": "x", "memory": "top"}, "claims.0.memory"),
    ],
)
def test_wrong_claim_is_refused(claim: dict[str, Any], problem: str) -> None:
    with pytest.raises(InputError, match=re.escape(problem)):
        make_profile(Document("p.toml", {"name": "p", "claims": [claim]}))


def test_shipped_claims_name_their_source_and_an_installed_baseline() -> None:
    assert {claim.source[:3] for _, claim in CLAIMS} == set(SOURCES)
    for name, claim in CLAIMS:
        assert claim.said, (name, claim)
        assert not claim.against or claim.against in INPUTS.files, (name, claim)


@pytest.mark.parametrize("name", profiles_with_claims(INPUTS))
def test_changes_of_shipped_claims_are_valid_assignments(name: str) -> None:
    for _, claim in (each for each in CLAIMS if each[0] == name):
        for profile, changes in ((name, claim.changes), (claim.against or name, claim.against_changes)):
            INPUTS.profile(profile, [text for text in changes if text.startswith("plugins.")])


def test_page_has_one_row_for_each_claim() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ") and "---" not in line][1:]
    stated = [f"| {name} | {claim.said} ({claim.source}) |" for name, claim in CLAIMS]
    assert [row[: len(text)] for row, text in zip(rows, stated, strict=True)] == stated
    counts = re.findall(r"(\d+) (confirmed|refuted|not measurable here)", PAGE.read_text(encoding="utf-8"))
    assert {verdict: int(number) for number, verdict in counts} == {
        verdict: sum(f" | {verdict} | " in row for row in rows) for _, verdict in counts
    }


@with_pinned_torch
@pytest.mark.filterwarnings("ignore")
def test_page_has_the_forecast_of_today(tmp_path: Path) -> None:
    """`python benchmarks/claims.py` writes the page. One profile stands for all."""
    findings = list(Forecast(INPUTS, tmp_path).findings("rtx3070_8gb_batch16_before"))
    for row in markdown(findings).splitlines()[2:]:
        assert row in PAGE.read_text(encoding="utf-8").splitlines()
