"""Compare the figures that docs/notes.md promises (benchmarks/claims/*.toml) with plans, and write docs/claims.md.

    python benchmarks/claims.py [--cache FOLDER]

A claim names a profile, a quantity (`what`) and its range (`expect`; a single value is the lowest), with the
words of the note (`said`). `changes` are `--set` assignments. With `against` (another profile) or
`against_changes` it is a ratio. `missing` says why the figure cannot be checked, `note`
explains a difference. Needs no GPU, data or weights.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
import tomllib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from reference import reference_memory, reference_plan

from hwopt.memory.forecast.planner import context_gib
from hwopt.planning.inputs import Inputs
from hwopt.planning.memory_plan import MemoryPlan
from hwopt.planning.plan import Plan

FOLDER = Path(__file__).parent / "claims"
DOCUMENT = Path(__file__).parents[1] / "docs" / "claims.md"
BEGIN, END = "<!-- claims: begin -->\n", "<!-- claims: end -->\n"
COLUMNS = ("profile", "the note says", "expected", "forecast", "verdict", "explanation")
MEMORY_ERROR = 0.07
"""Largest error of the forecast of reserved memory on published runs (docs/memory.md)."""
TRACED = ("peak_memory_gib", "eval_memory_gib", "free_memory_gib", "activations_gib")
"""Quantities with that error. Weights, gradients and states are counted exactly."""
NOT_FORECAST = {
    "gpu_utilization": "a plan predicts no utilization",
    "cpu_utilization": "a plan predicts no utilization",
    "eval_f1": "a plan predicts no score, and the author's data are not published",
    "eval_samples_per_second": "a plan predicts no time of an evaluation",
    "matmul_seconds": "a plan predicts the time of a step, not of single operations",
    "attention_seconds": "a plan predicts the time of a step, not of single operations",
    "update_seconds": "a plan predicts the time of a step, not of single operations",
}
NOTE_SETS = dict.fromkeys(
    ("t4_16gb", "rtx3090_24gb", "rtx3090_24gb_experimental", "rtx3090_24gb_max_perf", "rtx3090_24gb_initial"),
    ("plugins.checkpointing.layers=all",),
)
"""Profile -> what its note sets and the profile leaves to the forecast."""
Planned = tuple[Plan, MemoryPlan]
Range = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A figure of a note. Times in seconds, memory in GiB, utilization in percent, scores as fractions."""

    profile: str
    what: str
    expect: list[float]
    said: str = ""
    against: str = ""
    against_changes: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    memory: str = "nvidia-smi"
    """The counter of a memory figure: nvidia-smi (the whole card), or torch's allocator."""
    samples: int | None = None
    """Training samples of an epoch."""
    missing: str = ""
    note: str = ""
    anchor: str
    """The section of docs/notes.md."""

    @property
    def is_ratio(self) -> bool:
        return bool(self.against or self.against_changes)

    @property
    def range(self) -> Range:
        return self.expect[0], self.expect[1] if len(self.expect) == 2 else float("inf")


def read_claims(folder: Path = FOLDER) -> Iterator[Claim]:
    """The claims of all notes."""
    for path in sorted(folder.glob("*.toml")):
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        for row in content["claims"]:
            lists = {key: tuple(row[key]) for key in ("changes", "against_changes") if key in row}
            yield Claim(anchor=content["note"], **{"samples": content.get("samples")} | row | lists)


def forecast(claim: Claim, plan: Plan, memory: MemoryPlan) -> Range | None:
    """The quantity by the plan, at the two ends of the forecast; None if the plan has none."""
    if claim.what.endswith(("_seconds", "_per_second")):
        return time_of(claim, plan, memory)
    context, parts = context_gib(plan.hardware), memory.parts
    kinds = ("weights", "gradients", "optimizer_state", "masters")
    found = {
        "peak_memory_gib": memory.peak_gib if claim.memory == "allocator" else memory.highest_gib + context,
        "eval_memory_gib": (memory.eval_peak_gib or 0) + context,
        "free_memory_gib": memory.free_gib - memory.highest_gib - context,
        "states_gib": sum(parts.get(kind, 0.0) for kind in kinds),
        "optimizer_state_gib": parts["optimizer_state"],
        "activations_gib": parts["activations"],
        "largest_train": memory.largest_train,
        "rows_per_step": plan.batch.step,
        "trained_parameters": parts["gradients"],
    }[claim.what]
    return None if found is None else (found, found)


def time_of(claim: Claim, plan: Plan, memory: MemoryPlan) -> Range | None:
    if memory.time is None or (claim.what in ("epoch_seconds", "total_seconds") and not claim.samples):
        return None
    fast, slow = memory.time.step
    if claim.what == "steps_per_second":
        return 1 / slow, 1 / fast
    if claim.what == "samples_per_second":
        return plan.batch.step / fast, plan.batch.step / slow
    epochs = plan.training.num_train_epochs if claim.what == "total_seconds" else 1
    steps = epochs * (claim.samples or 0) / plan.batch.step
    return steps * fast, steps * slow


def row(claim: Claim, planned: Callable[[str, tuple[str, ...]], Planned]) -> tuple[str, ...]:
    """The cells of the claim in docs/claims.md."""
    found, verdict, explanation = None, "not measured", claim.missing or NOT_FORECAST.get(claim.what, "")
    if not explanation:
        plan, memory = planned(claim.profile, claim.changes)
        found = forecast(claim, plan, memory)
        if claim.is_ratio and found:
            base = forecast(claim, *planned(claim.against or claim.profile, claim.against_changes))
            found = base and (found[0] / base[0], found[1] / base[1])
        explanation = claim.note if found else "the note does not state the number of samples"
    if found:
        found = min(found), max(found)
        error = MEMORY_ERROR if claim.what in TRACED and not claim.is_ratio else 1e-9
        low, high = claim.range
        agrees = found[0] * (1 - error) <= high and low <= found[1] * (1 + error)
        verdict = "confirmed" if agrees else "refuted"
    return (
        claim.profile,
        f"{claim.said or claim.what} ([{claim.anchor}](notes.md#{claim.anchor}))",
        f"{claim.what.removesuffix('_gib').replace('_', ' ')} {shown(claim, claim.range)}{baseline(claim)}",
        f"{shown(claim, found)} ({described(plan)})" if found else "-",
        verdict,
        explanation,
    )


def described(plan: Plan) -> str:
    model = f"{plan.model.model_type}, {plan.model.parameters / 1e6:,.1f} M"
    return f"{model}, {plan.batch.train} x {plan.job.data.max_length} tokens, {plan.hardware.name}"


def baseline(claim: Claim) -> str:
    """What a ratio is relative to, and the changes of the profile, in words."""
    text = f" with {', '.join(claim.changes)}" if claim.changes else ""
    if claim.is_ratio:
        text += f" of {' with '.join(filter(None, (claim.against, ', '.join(claim.against_changes))))}"
    return text


def shown(claim: Claim, ends: Range) -> str:
    """Both ends in the unit of the claim's quantity; a ratio has none."""
    scale, form, unit = 1.0, "{:,.4g}", ""
    if claim.is_ratio:
        form = "x{:.2f}"
    elif claim.what.endswith("_gib"):
        form, unit = "{:.2f}", " GiB"
    elif claim.what.endswith("_seconds"):
        scale, form, unit = 60.0, "{:.3g}", " min"
    elif claim.what.endswith("utilization"):
        form, unit = "{:g}", " %"
    low, high = (form.format(end / scale) for end in ends)
    if ends[1] == float("inf"):
        return f"at least {low}{unit}"
    return f"{low}{unit}" if low == high else f"{low} to {high}{unit}"


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, help="folder for traces")
    options = parser.parse_args()
    inputs = Inputs()
    with tempfile.TemporaryDirectory() as empty:
        cache = options.cache or Path(empty)

        @functools.cache
        def planned(profile: str, changes: tuple[str, ...]) -> Planned:
            print(profile, *changes, flush=True)
            plan = reference_plan(profile, inputs, cache, (*NOTE_SETS.get(profile, ()), *changes))
            return plan, reference_memory(plan, cache)

        rows = sorted(row(claim, planned) for claim in read_claims())
    counts = Counter(cells[COLUMNS.index("verdict")] for cells in rows)
    numbers = ", ".join(f"{number} {verdict}" for verdict, number in sorted(counts.items()))
    lines = [f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |" for cells in (COLUMNS, *rows)]
    table = "\n".join([lines[0], "|---" * len(COLUMNS) + "|", *lines[1:]])
    text = DOCUMENT.read_text(encoding="utf-8")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    page = f"{before}{BEGIN}{len(rows)} claims: {numbers}.\n\n{table}\n{END}{after}"
    DOCUMENT.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
