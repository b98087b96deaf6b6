"""The HTML report: what it says of a run."""

import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from report.run_folders import EVIDENCE, MEMORY, PLAN, PROCESS, changed, eval_row, log_rows, record_of

from hwopt.records.run_record import RunRecord
from hwopt.report.page import LIMITS, page_of

MARKUP = "<script>window.hacked = true</script>"
NAMES = ["spam", MARKUP, 'a "quoted" & <b>label</b>']
DETAILS = {
    "best_step": 50,
    "best_eval_f1": 0.5,
    "best_eval_classes": [{"label": name, "precision": 0.5, "recall": 0.25, "f1": 0.3333, "support": 4} for name in NAMES],
    "best_eval_confusion_matrix": {"labels": NAMES, "rows": [[1, 2, 3], [4, 5, 6], [7, 8, 9]]},
}
CUDA = changed(PLAN, hardware__device_type="cuda", hardware__name="NVIDIA GeForce RTX 3070", memory=None) | {"memory": MEMORY}
USE = {"data_wait_share": 0.2, "cpu_percent": 130.2, "mfu": 0.412, "joules_per_sample": 0.5678, "new_figure": 3.0}
USE |= {"gpu_percent": 91.4, "power_watts": 180.6, "temperature_celsius": 71, "clock_mhz": 1725.0}
USE |= {"throttled_share": 0.25, "throttle_reasons": {"power limit": 0.25}}
USE |= {"host_ms_per_micro_batch": 12.3456, "device_ms_per_micro_batch": 30.1, "device_waits_share": 0.1}
USE |= {"forward_share": 0.3, "backward_share": 0.6, "update_share": 0.1}
VERDICT = {"limit": "input-bound", "figure": "the loop waited 20% of the time for data", "next": "num_workers = 4"}
HELD = {"weights": 0.5, "gradients": 0.0, "optimizer_state": 1.0, "masters": 0.0}
ROWS = [*log_rows(20), eval_row(50, loss=1.0, f1=0.5), eval_row(100, loss=0.9, f1=0.4)]


def one_run(folder: Path, **options: Any) -> RunRecord:
    return record_of(folder, ROWS, summary=DETAILS, **options)


def text_of(page: str) -> str:
    """The text of a page, without tags and styles, on one line."""
    body = re.sub(r"(?s)<(style|title|desc).*?</\1>", " ", page)
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]*>", " ", body)))


def test_page_begins_with_the_verdict(tmp_path: Path) -> None:
    text = text_of(page_of([one_run(tmp_path / "run", plan=CUDA, memory=HELD)]))
    lines = [
        "run run ✓ good done, 100 steps",
        "memory ✓ good fits: 3.50 GiB of 16.0 GiB at the peak; predicted 4.00 GiB",
        "evidence ✓ good 1 of 1 plugins are active in the running process",
        "model = result eval_f1 0.5000, the best evaluation, of step 50",
    ]
    places = [text.index(line) for line in lines]
    assert places == sorted(places)
    assert places[-1] < text.index("Figures")


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"status": (5, "the loss diverged")}, "run ✗ problem exit code 5 at step 100 of 100: the loss diverged"),
        ({"status": (7, "does not fit")}, "memory ✗ problem does not fit into the device's memory"),
        ({"status": (None, "running")}, "run ✗ problem killed at step 100 of 100"),
        ({"evidence": {}}, "evidence ? open none: no step was observed"),
        (
            {"evidence": {"plugins": EVIDENCE, "at_end": {"plugins": [EVIDENCE[0] | {"status": "inactive"}]}}},
            "evidence ✗ problem 0 of 1 plugins are active in the running process; precision is inactive",
        ),
    ],
)
def test_verdict_names_the_problem(options: dict[str, Any], line: str, tmp_path: Path) -> None:
    assert line in text_of(page_of([one_run(tmp_path / "run", **options)]))


def test_page_has_plan_memory_classes_settings_versions_and_command(tmp_path: Path) -> None:
    text = text_of(page_of([one_run(tmp_path / "run", plan=CUDA, memory=HELD)]))
    for part in (
        "precision apply bf16 active: 12 of 16 matmuls in bf16 dtype bf16",
        "tf32 skip no card",
        "optimizer state 1.00 GiB 1.00 GiB",
        "gradients, activations and temporary 2.50 GiB 2.00 GiB",
        "peak 4.00 GiB 3.50 GiB",
        "spam 0.5000 0.2500 0.3333 4",
        "true \\ predicted",
        "training.seed 42 default",
        "torch 2.13.0",
        "hwopt run job.toml --profile tiny",
        "a note",
    ):
        assert part in text, part


def test_page_loads_nothing_and_names_its_tables_and_charts(tmp_path: Path) -> None:
    page = page_of([one_run(tmp_path / "run", plan=CUDA, memory=HELD)])
    assert not re.search(r"https?:|<script|<link(?! rel=\"icon\")|@import|src=", page)
    assert page.count('<svg class="chart"') == page.count("over the steps</title>") == page.count("</desc>") == 7
    assert page.count("<th ") == page.count("<th scope=")
    assert page.count("<table") == len(re.findall(r'role="region" aria-label="\w', page))


def test_page_shows_what_limits_the_speed_and_the_parts_of_a_step(tmp_path: Path) -> None:
    rows = [row | {"use": {"power_watts": 180.0 + index}} for index, row in enumerate(log_rows(20))]
    page = page_of([record_of(tmp_path / "run", rows, summary={"use": USE, "verdict": VERDICT})])
    text = text_of(page)
    for part in (
        "speed ✗ problem input-bound: the loop waited 20% of the time for data. Next: num_workers = 4",
        "mean GPU use 91 %",
        "MFU 41.2%",
        "energy per sample 0.568 J",
        "waiting for data 20.0 % forward 24.0 % backward 48.0 % update of the weights 8.0 %",
        "host time per micro-batch 12.35 ms",
        "power, mean 181 W",
        "throttle reasons: power limit 25.0%",
        "Power (W)",
    ):
        assert part in text, part
    widths = [float(width) for width in re.findall(r'<rect class="f\d" x="[\d.]+" y="0" width="([\d.]+)"', page)]
    assert sum(widths) == pytest.approx(460, abs=0.1)
    well = page_of([record_of(tmp_path / "well", rows, summary={"verdict": VERDICT | {"limit": "compute-bound"}})])
    assert "speed ✓ good compute-bound" in text_of(well)


def test_a_small_model_has_its_parameters_in_full(tmp_path: Path) -> None:
    page = page_of([record_of(tmp_path / "run", log_rows(3), plan=changed(PLAN, model__parameters=41_210))])
    assert "41,210 parameters" in page


@pytest.mark.parametrize(
    ("train", "shown"),
    [
        ("a.csv", "a.csv"),
        (["a.csv", "b.csv"], "a.csv, b.csv"),
        ([{"path": "a.csv", "weight": 3.0, "split": None}, {"path": "b", "weight": 1.0, "split": "c"}], "75.0% a.csv, 25.0% b"),
    ],
)
def test_data_of_a_run_are_named_as_on_the_screen(train: Any, shown: str, tmp_path: Path) -> None:
    page = page_of([record_of(tmp_path / "run", log_rows(3), plan=changed(PLAN, job__data={"train": train}))])
    assert f"<dt>data</dt><dd>{shown}, " in page


def test_memory_of_a_cpu_run_is_not_split(tmp_path: Path) -> None:
    text = text_of(page_of([one_run(tmp_path / "run", memory=HELD)]))
    assert "peak of the process (resident) - 3.50 GiB" in text
    assert "Memory was not predicted for this run" in text
    assert "activations" not in text


def test_sections_without_data_are_left_out(tmp_path: Path) -> None:
    text = text_of(page_of([record_of(tmp_path / "run", evidence={}, processes=[])]))
    for heading in ("Course of the training", "Memory", "Classes", "Command"):
        assert f" {heading} " not in text, heading
    assert "Plan" in text


def test_several_runs_have_ratios_and_differences(tmp_path: Path) -> None:
    plan = changed(PLAN, training__learning_rate=2e-3)
    fast = record_of(tmp_path / "fast", log_rows(20, 150, seed=1), plan=plan)
    text = text_of(page_of([one_run(tmp_path / "run"), fast]))
    assert "2 runs: run, fast" in text
    assert re.search(
        r"fast: 1\.[45]\d\d times the samples/s, 1\.\d+ to 1\.\d+ \(19 log intervals, the same samples in each\)", text
    )
    assert "training.learning_rate 0.001 0.002" in text
    assert "Runs of different jobs" not in text
    other = record_of(tmp_path / "other", log_rows(20), processes=[changed(PROCESS, data__train="xyz")])
    assert "Runs of different jobs: the samples of data.train differ" in text_of(page_of([one_run(tmp_path / "again"), other]))


def test_report_of_large_runs_is_below_a_megabyte(tmp_path: Path) -> None:
    labels = [f"label-{number:04d}-{'x' * 100}" for number in range(200)]
    classes = [{"label": label, "precision": 0.5, "recall": 0.5, "f1": 0.5, "support": 10} for label in labels]
    matrix = {"labels": labels, "rows": [[7] * 200] * 200}
    summary = {"best_eval_classes": classes, "best_eval_confusion_matrix": matrix}
    records = [record_of(tmp_path / f"run-{number}", log_rows(3_000), summary=summary) for number in range(6)]
    page = page_of(records)
    assert len(page.encode()) < 1_000_000
    text = text_of(page)
    assert f"the {LIMITS.classes} classes with the lowest F1, of 200" in text
    assert "most frequent of 39,800 confusions" in text, f"more than {LIMITS.columns} labels have no whole matrix"


def test_names_and_labels_with_markup_are_escaped(tmp_path: Path) -> None:
    plan = changed(PLAN, notes=[MARKUP], profile=MARKUP, training__seed=MARKUP)
    plan["plugins"][0]["reason"] = MARKUP
    processes = [PROCESS | {"command": MARKUP}]
    evidence = {"plugins": [{"name": MARKUP, "status": "active", "seen": MARKUP}]}
    folder = tmp_path / MARKUP.replace("/", "\u2215")
    page = page_of([one_run(folder, plan=plan, processes=processes, evidence=evidence, status=(5, MARKUP + "\x1b[31m\u202e"))])
    assert "<script" not in page
    assert "<b>label" not in page
    assert page.count("&lt;script&gt;") >= 8
    assert "\x1b" not in page, "control characters are spelled out"
    assert "\\u202e" in page
