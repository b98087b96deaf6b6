"""Compare the memory that docs/notes.md states with the plan, for several lengths of the rows.

    python benchmarks/published_batches.py [--write] [--cache FOLDER]

The notes name neither model nor length. Planned is what nvidia-smi shows: what torch reserves, and CUDA's context. `--write`
puts the table into docs/memory.md. Needs no GPU, data or weights.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from reference import reference_memory, reference_plan

from hwopt.memory.forecast.planner import context_gib
from hwopt.planning.inputs import Inputs

DOCUMENT = Path(__file__).parents[1] / "docs" / "memory.md"
BEGIN, END = "<!-- published batches: begin -->\n", "<!-- published batches: end -->\n"
LENGTHS = (64, 128, 192, 256, 512)


@dataclass(frozen=True)
class Stated:
    """Memory that a document states for a profile."""

    what: str
    gib: tuple[float, float]
    profile: str
    changes: tuple[str, ...] = ()
    note: str = ""


NOTES = {
    "rtx-3070-64-rows": "RTX 3070, 64 rows",
    "rtx-3070-48-rows": "RTX 3070, 48 rows",
    "rtx-3070-16-or-32-rows": "RTX 3070, 16 or 32 rows",
    "rtx-3090": "RTX 3090",
}
"""Anchor in docs/notes.md -> title."""
FIRST, SECOND, THIRD, FOURTH = (f"[{title}](notes.md#{anchor})" for anchor, title in NOTES.items())
STATED = (
    Stated(f"{SECOND}: O1, batch 48", (7.8, 7.8), "rtx3070_8gb_batch48", note="its sum is 1.5 + 6.3"),
    Stated(
        f"{SECOND}: batch 32",
        (7.0, 7.0),
        "rtx3070_8gb_batch48_before",
        note="its sum is 1.5 + 5.5; contradicts the next row",
    ),
    Stated(f"{THIRD}: batch 32, O2, 8-bit AdamW", (3.5, 4.0), "rtx3070_8gb_batch32"),
    Stated(f"{FIRST}: O1, batch 80", (7.5, 7.8), "rtx3070_8gb_before"),
    Stated(f"{FIRST}: batch 64, O2, 8-bit AdamW", (6.5, 7.0), "rtx3070_8gb"),
    Stated(f"{THIRD}: O1, batch 16", (2.0, 2.5), "rtx3070_8gb_batch16"),
    Stated(f"{FOURTH}: Gemma 3 1B, DoRA, batch 12, classification", (18, 20), "rtx3090_24gb"),
    Stated(
        f"{FOURTH}: the same as a language model",
        (18, 20),
        "rtx3090_24gb",
        ("task.kind=causal-lm",),
        "the note trains a classifier",
    ),
)


def planned_gib(stated: Stated, length: int, inputs: Inputs, cache: Path) -> float:
    """Return what nvidia-smi would show for rows of `length` tokens, by the plan."""
    plan = reference_plan(stated.profile, inputs, cache, (*stated.changes, f"data.max_length={length}"))
    return reference_memory(plan, cache).highest_gib + context_gib(plan.hardware)


def row(stated: Stated, inputs: Inputs, cache: Path) -> str:
    found = [planned_gib(stated, length, inputs, cache) for length in LENGTHS]
    low, high = (float(np.interp(gib, found, LENGTHS, left=0, right=np.inf)) for gib in stated.gib)
    if high == 0:
        verdict = "less than the plan needs for any length"
    elif np.isinf(low):
        verdict = f"more than the plan needs for {LENGTHS[-1]} tokens"
    else:
        ends = f"{low:.0f}" if round(low) == round(high) else f"{low:.0f} to {high:.0f}"
        verdict = f"holds at about {ends} tokens"
    said = " to ".join(f"{gib:g}" for gib in dict.fromkeys(stated.gib))
    cells = [stated.what, said, *(f"{gib:.2f}" for gib in found), "; ".join(filter(None, (verdict, stated.note)))]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into docs/memory.md")
    parser.add_argument("--cache", type=Path, help="folder for traces")
    options = parser.parse_args()
    columns = ("document: setting", "states", *(f"{length} tokens" for length in LENGTHS), "verdict")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    inputs = Inputs()
    with tempfile.TemporaryDirectory() as empty:
        for stated in STATED:
            lines.append(row(stated, inputs, options.cache or Path(empty)))
            print(lines[-1], flush=True)
    if options.write:
        text = DOCUMENT.read_text(encoding="utf-8")
        before, after = text.split(BEGIN)[0], text.split(END)[1]
        table = "\n".join(lines)
        DOCUMENT.write_text(f"{before}{BEGIN}{table}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
