"""Check all claims of the shipped profiles against their plans, and write docs/claims.md.

    python benchmarks/claims.py [--cache FOLDER]

Needs no GPU, data or weights. `hwopt claims` prints the same.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections import Counter
from pathlib import Path

from hwopt.memory.claims import Forecast, profiles_with_claims
from hwopt.planning.inputs import Inputs
from hwopt.report.claims import markdown

DOCUMENT = Path(__file__).parents[1] / "docs" / "claims.md"
BEGIN, END = "<!-- claims: begin -->\n", "<!-- claims: end -->\n"


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, help="folder for traces")
    options = parser.parse_args()
    inputs = Inputs()
    with tempfile.TemporaryDirectory() as empty:
        forecast = Forecast(inputs, options.cache or Path(empty))
        findings = []
        for name in profiles_with_claims(inputs):
            found = list(forecast.findings(name))
            print(name, *(finding.verdict for finding in found), sep="; ", flush=True)
            findings += found
    counts = Counter(finding.verdict for finding in findings)
    numbers = ", ".join(f"{number} {verdict}" for verdict, number in sorted(counts.items()))
    text = DOCUMENT.read_text(encoding="utf-8")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    table = f"{len(findings)} claims: {numbers}.\n\n{markdown(findings)}"
    DOCUMENT.write_text(f"{before}{BEGIN}{table}{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
