"""Tables at 80 columns against tests/golden/screen.

`HWOPT_UPDATE_GOLDEN=1 pytest tests/report/test_tables.py` rewrites the files; read the difference before you commit.
"""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from golden_files import check_golden
from report.printed import printed
from report.run_folders import PLAN, changed

from hwopt.config.task_kinds import task_facts
from hwopt.hardware.device import Hardware, described
from hwopt.memory.forecast.communication import Ranks, Volume
from hwopt.memory.forecast.sharding import Comparison, SchemeMemory
from hwopt.planning.memory_plan import Change, MemoryPlan, Prediction
from hwopt.report.comparison import show_plans
from hwopt.report.memory import describe_largest, show_change, show_largest, show_memory, show_parallel
from hwopt.report.sheet import Sheet, seconds_text
from hwopt.report.terminal import Terminal, show_sheet

GOLDEN = Path(__file__).parents[1] / "golden" / "screen"
CARD = described("GeForce RTX 3070", (8, 6), 8.0)
MEMORY = MemoryPlan(
    tier="traced",
    error="off by 0.03 % in the median",
    rows=64,
    width=192,
    width_source="the longest text",
    parts={"weights": 0.2, "optimizer_state": 0.21, "activations": 4.31},
    peak_gib=5.18,
    eval_peak_gib=1.48,
    reserve_gib=0.74,
    free_gib=8.0,
    largest_train=81_801,
    largest_eval=1_048_576,
    largest_max_length=288,
    time=Prediction((4.58, 10.5), (9.16, 21.1), (27.5, 63.3), "estimated from the card's peak speeds"),
    changes=(
        Change(("plugins.batch.train = 31", "plugins.batch.eval = 125"), 37.86, True, 1.09, "finer micro-batches", False, ()),
    ),
)


def plan(profile: str, hardware: Hardware, memory: MemoryPlan) -> Any:
    context = SimpleNamespace(task=task_facts("text-classification"))
    return SimpleNamespace(profile=SimpleNamespace(name=profile), hardware=hardware, memory=memory, context=context)


def side_by_side(console: Terminal) -> None:
    missing = replace(MEMORY, peak_gib=44.25, free_gib=16.0, largest_train=468_058)
    card, other = asdict(CARD), asdict(described("Tesla T4", (7, 5), 16.0))
    first = PLAN | {"profile": "small", "hardware": card, "memory": MEMORY.to_dict()}
    second = changed(PLAN, profile="large", hardware=other, memory=missing.to_dict(), training__seed=7)
    show_plans(console, [json.loads(json.dumps(each)) for each in (first, second)])


def memory(console: Terminal) -> None:
    show_memory(console, plan("rtx3070_8gb", CARD, MEMORY))
    show_largest(console, MEMORY)
    show_change(console, MEMORY.changes[0])


def sharding(console: Terminal) -> None:
    def scheme(name: str, states: float, peak: float, sent: float) -> SchemeMemory:
        volume = Volume(sent * 0.875 * (1 << 30), sent * 0.125 * (1 << 30))
        return SchemeMemory(name, 64, {"weights": states}, peak, False, None, 80 - peak, volume, sent * (1 << 30))

    schemes = (scheme("data parallel", 18.42, 28.15, 9.06), scheme("FSDP hybrid", 2.3, 110.57, 1252.37))
    show_parallel(console, Comparison(Ranks(64, 8), 4, "traced", schemes))


def plugins(console: Terminal) -> None:
    reason = "adamw_bnb_8bit: bitsandbytes on a CPU is slow and there is no card memory to save; takes adamw_torch_fused"
    rows = [("optimizer", "fallback", reason), ("tf32", "skip", "needs a CUDA device of compute capability 8.0, found a CPU")]
    show_sheet(console, Sheet(("plugin", "here", "why"), rows, folded=2))


TABLES = [side_by_side, memory, sharding, plugins]
FIGURES = re.compile(r"\d[\d,.]*\d")


@pytest.mark.parametrize(
    ("train", "evaluation", "text"),
    [
        (0, None, "no micro-batch of this width"),
        (0, 0, "no micro-batch beside the planned evaluation batch, no evaluation batch beside the planned micro-batch"),
        (4, 0, "micro-batch 4, no evaluation batch beside the planned micro-batch"),
    ],
)
def test_sizes_that_do_not_fit_are_named_with_what_they_are_beside(train: int, evaluation: int | None, text: str) -> None:
    assert describe_largest(replace(MEMORY, largest_train=train, largest_eval=evaluation, largest_max_length=None)) == text


def test_memory_has_no_line_for_a_part_without_a_byte() -> None:
    none = replace(MEMORY, parts={**MEMORY.parts, "gradients": 0.0})
    shown = printed(lambda console: show_memory(console, plan("rtx3070_8gb", CARD, none)))
    assert "gradients" not in shown
    assert "optimizer state" in shown


def test_blocks_leave_out_what_is_absent() -> None:
    sheet = Sheet(
        ("variant", "time/step", "speed", "note"),
        [("baseline", "14 ms", "1", ""), ("profile", "-", "-", "not measured")],
        folded=3,
    )
    shown = printed(lambda console: show_sheet(console, sheet), 24)
    assert shown.splitlines() == ["baseline", "  time/step: 14 ms", "  speed: 1", "profile", "  note: not measured"]


@pytest.mark.parametrize("table", TABLES)
def test_tables_match_the_golden_files(table: Callable[[Terminal], None]) -> None:
    made = printed(table, 80)
    check_golden(GOLDEN / f"{table.__name__}-80.txt", made)
    assert max(map(len, made.splitlines())) <= 80


@pytest.mark.parametrize("width", [40, 120])
@pytest.mark.parametrize("table", TABLES)
def test_no_terminal_cuts_a_figure(table: Callable[[Terminal], None], width: int) -> None:
    assert sorted(FIGURES.findall(printed(table, width))) == sorted(FIGURES.findall(printed(table)))


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [((0.439, 1.31), "439 to 1,310 ms"), ((0.0725, 0.156), "72.5 to 156 ms"), ((1.15,), "1.15 s"), ((4e6,), "1,110 h")],
)
def test_times_have_three_digits_and_no_exponent(seconds: tuple[float, ...], shown: str) -> None:
    assert seconds_text(*seconds) == shown
