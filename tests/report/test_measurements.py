"""Tables of numbers in a summary become tables with units."""

from __future__ import annotations

from hwopt.report.measurements import measurement_tables

SUMMARY = {
    "step": 100,
    "best_eval_confusion_matrix": {"labels": ["a"], "rows": [[1]]},
    "gpu": {"use_percent": 91.4, "power_watts": 180.6, "memory_gib": 7.123, "throttled": "no", "samples": {"number": 1200}},
    "step_time": {"forward_share": 0.345, "host_ms": 12.3456, "tokens_per_second": 81_000.0},
}


def test_each_table_of_numbers_is_shown_with_units() -> None:
    assert dict(measurement_tables(SUMMARY)) == {
        "gpu": [
            ("use", "91 %"),
            ("power", "181 W"),
            ("memory", "7.12 GiB"),
            ("throttled", "no"),
            ("samples number", "1,200"),
        ],
        "step time": [("forward", "34.5%"), ("host", "12.35 ms"), ("tokens per second", "81,000 tokens/s")],
    }
