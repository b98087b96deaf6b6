"""Print the verdicts on the claims of profiles: as a table, as JSON, and as the rows of docs/claims.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console

from hwopt.report.terminal import say, show_table

if TYPE_CHECKING:
    from hwopt.config.claim import Claim
    from hwopt.memory.claims import Finding

COLUMNS = ("profile", "the source says", "expected", "found", "verdict", "explanation")
SECONDS = (("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3))


def show_findings(console: Console, findings: Sequence[Finding]) -> None:
    """Print one row per claim, then the number of each verdict."""
    show_table(console, COLUMNS, (cells(finding) for finding in findings), folded=5)
    counts = Counter(finding.verdict for finding in findings)
    say(console, "claims", ", ".join(f"{number} {verdict}" for verdict, number in sorted(counts.items())))


def cells(finding: Finding) -> tuple[str, ...]:
    claim = finding.claim
    return (
        finding.profile,
        f"{claim.said or claim.what} ({claim.source})",
        f"{claim.what.removesuffix('_gib').replace('_', ' ')} {show_range(claim, claim.low, claim.high)}{baseline(claim)}",
        found_text(finding),
        finding.verdict,
        finding.explanation,
    )


def found_text(finding: Finding) -> str:
    """The found range with its basis; "-" if nothing was found."""
    if finding.found is None:
        return "-"
    return f"{finding.found.basis}: {show_range(finding.claim, finding.found.low, finding.found.high)} ({finding.found.on})"


def baseline(claim: Claim) -> str:
    """What a ratio is relative to, and the changes of the profile, in words."""
    parts = []
    if claim.changes:
        parts.append(f" with {', '.join(claim.changes)}")
    if claim.is_ratio:
        parts.append(f" of {' with '.join(filter(None, (claim.against, ', '.join(claim.against_changes))))}")
    return "".join(parts)


def show_range(claim: Claim, low: float, high: float) -> str:
    """Both ends in the unit of the claim's quantity; a ratio has none."""
    if claim.is_ratio:
        return between(low, high, "x{:.2f}".format)
    if claim.what.endswith("_gib"):
        return between(low, high, "{:.2f}".format) + " GiB"
    if claim.what.endswith("_seconds") and "per" not in claim.what:
        highest = low if high == float("inf") else high
        unit, size = next(((unit, size) for unit, size in SECONDS if highest >= size), SECONDS[-1])
        return between(low / size, high / size, "{:.3g}".format) + f" {unit}"
    if claim.what.endswith("utilization"):
        return between(low, high, "{:g}".format) + " %"
    return between(low, high, "{:,.4g}".format)


def between(low: float, high: float, show: Any) -> str:
    if high == float("inf"):
        return f"at least {show(low)}"
    return show(low) if show(low) == show(high) else f"{show(low)} to {show(high)}"


def as_dict(finding: Finding) -> dict[str, Any]:
    """The finding for JSON."""
    found = finding.found
    return {
        "profile": finding.profile,
        **finding.claim.model_dump(exclude_defaults=True),
        "verdict": finding.verdict,
        "explanation": finding.explanation,
        "found": None if found is None else vars(found),
    }


def markdown(findings: Iterable[Finding]) -> str:
    """The table of docs/claims.md."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    lines += [f"| {' | '.join(cell.replace('|', '/') for cell in cells(finding))} |" for finding in findings]
    return "\n".join(lines) + "\n"
