"""The table of a bench on the terminal and as a page."""

from dataclasses import replace
from typing import Any

import pytest
from report.printed import printed
from report.test_page import MARKUP, text_of

from hwopt.report.bench import bench_page, bench_verdict, show_bench
from hwopt.trials.benchmark import Bench, BenchRow
from hwopt.trials.rounds import Speedup

FACTS = {"profile": "mine", "baseline": "no plugins: fp32, 8 rows per step"}


def row(name: str, role: str, reference: str = "", value: float | None = None, **more: Any) -> BenchRow:
    clear = more.pop("clear", True)
    found = None if value is None else Speedup(value, value * 0.98, value * 1.02, 5, clear)
    measured = {"samples_per_second": 100.0, "tokens_per_second": 2345.6, "seconds_per_step": 0.08, "seconds_per_epoch": 150.0}
    figures = {} if more.get("ending") else {"rounds": 5, "peak_gib": 0.75, **measured}
    return BenchRow(name, role, reference, speedup=found, **(figures | more))


ROWS = [
    row("baseline", "baseline"),
    row("baseline again", "copy", "baseline", 1.004, clear=False, loss="equal", loss_agrees=True),
    row("+ precision", "added", "baseline", 1.5, loss="up to 0.003 apart", loss_agrees=True),
    row("+ sdpa", "added", "baseline", 1.01, clear=False, loss="equal", loss_agrees=True),
    row("+ batch", "added", "baseline", 0.9, loss="not compared: 16 instead of 8 rows per step"),
    row("+ tf32", "added", "baseline", ending="not applied here", note="needs a CUDA device"),
    row("profile", "profile", "baseline", 1.6, loss="up to 0.3 apart", loss_agrees=False),
    row("- precision", "left out", "profile", 0.7, note="not active: sdpa: math kernel"),
    row("- batch", "left out", "profile", ending="out of memory", note="16 rows do not fit"),
]
BENCH = Bench(ROWS, FACTS, "resident memory of the process", ["a note"])


def lines_of(bench: Bench) -> list[str]:
    return [" ".join(line.split()) for line in printed(lambda console: show_bench(console, bench)).splitlines()]


def test_table_has_a_row_per_variant() -> None:
    lines = lines_of(BENCH)
    table = lines[lines.index("variant time/step time/epoch samples/s real tokens/s peak memory speed loss note") + 1 :]
    figures = "80 ms 2.5 min 100 2,346 0.75 GiB"
    assert table[0] == f"baseline {figures} 1 -"
    assert table[1] == f"baseline again {figures} x1.00 (0.98 to 1.02) of baseline ok: equal"
    assert table[2] == f"+ precision {figures} x1.50 (1.47 to 1.53) of baseline ok: up to 0.003 apart"
    assert table[5] == "+ tf32 - - - - - - - not applied here: needs a CUDA device"
    assert table[6] == f"profile {figures} x1.60 (1.57 to 1.63) of baseline DIFFERS: up to 0.3 apart"
    assert table[7] == f"- precision {figures} x0.70 (0.69 to 0.71) of profile - not active: sdpa: math kernel"
    assert table[8] == "- batch - - - - - - - out of memory: 16 rows do not fit"
    assert "noise: two copies of the baseline differ by x0.984 to x1.024" in "\n".join(lines)
    assert lines[lines.index("note: a note") + 2 :] == [
        "verdict, speed: the profile trains 1.60 (1.57 to 1.63) times the samples/s of the baseline; most of it by precision",
        "verdict, memory: 0.75 GiB at the peak, the baseline 0.75 GiB",
        "verdict, loss: profile: the losses differ by more than the plugins promise",
        "verdict, trials: failed: - batch (out of memory)",
    ]


@pytest.mark.parametrize(
    ("speed", "clear", "grade", "text"),
    [
        (1.6, True, "good", "trains 1.60 (1.57 to 1.63) times the samples/s of the baseline; most of it by precision"),
        (0.8, True, "bad", "trains 0.80 (0.78 to 0.82) times the samples/s of the baseline; most of it by batch"),
        (1.0, False, "open", "trains 1.00 (0.98 to 1.02) times the samples/s of the baseline: no clear difference in 5 rounds"),
        (None, True, "open", "has no speed: crashed: a bug"),
    ],
)
def test_verdict_says_what_the_profile_gains(speed: float | None, clear: bool, grade: str, text: str) -> None:
    more = {} if speed else {"ending": "crashed", "note": "a bug"}
    rows = [*ROWS[:5], row("profile", "profile", "baseline", speed, clear=clear, **more)]
    found = next(iter(bench_verdict(replace(BENCH, rows=rows))))
    assert (found.label, found.grade, found.text) == ("speed", grade, f"the profile {text}")


def test_page_begins_with_the_verdict() -> None:
    text = text_of(bench_page(BENCH, "hwopt bench"))
    assert text.index("speed ✓ good the profile trains 1.60") < text.index("baseline no plugins")
    assert text.index("trials ✗ problem failed: - batch") < text.index("baseline no plugins")


def test_difference_that_is_not_clear_is_marked() -> None:
    found = replace(BENCH, rows=[ROWS[0], replace(ROWS[2], speedup=Speedup(1.01, 0.98, 1.02, 5))])
    assert "= x1.01 (0.98 to 1.02) of baseline" in "\n".join(lines_of(found))


def test_page_escapes_names_and_messages() -> None:
    rows = [*ROWS, row(f"+ {MARKUP}", "added", "baseline", ending="crashed", note=MARKUP)]
    page = bench_page(replace(BENCH, rows=rows, facts=FACTS | {"profile": MARKUP}, notes=[MARKUP]), f"hwopt bench {MARKUP}")
    assert "<script" not in page
    assert text_of(page).count(MARKUP) >= 5
