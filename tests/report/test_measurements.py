"""How a run used its device, as tables with units."""

from __future__ import annotations

import pytest

from hwopt.report.verdicts import device_rows, step_parts, step_rows

USE = {
    "data_wait_share": 0.2,
    "gpu_percent": 91.4,
    "power_watts": 180.6,
    "temperature_celsius": 71,
    "clock_mhz": 1725.0,
    "throttled_share": 0.25,
    "throttle_reasons": {"power limit": 0.25},
    "cpu_percent": 130.2,
    "host_ms_per_micro_batch": 12.3456,
    "device_ms_per_micro_batch": 30.1,
    "device_waits_share": 0.1,
    "forward_share": 0.3,
    "backward_share": 0.6,
    "update_share": 0.1,
    "mfu": 0.412,
    "joules_per_sample": 0.5678,
    "new_figure": 3.0,
}


def test_parts_of_a_step_add_up_with_the_wait_for_data() -> None:
    parts = dict(step_parts(USE))
    assert parts == pytest.approx({"waiting for data": 0.2, "forward": 0.24, "backward": 0.48, "update of the weights": 0.08})
    assert step_parts({"data_wait_share": 0.2}) == [], "no step was timed"


def test_figures_have_their_units() -> None:
    assert dict(step_rows(USE)) == {
        "waiting for data, of the training": "20.0%",
        "forward, of a timed step": "30.0%",
        "backward, of a timed step": "60.0%",
        "update of the weights, of a timed step": "10.0%",
        "host time per micro-batch": "12.35 ms",
        "device time per micro-batch": "30.1 ms",
        "timed steps in which the device waited for the host": "10.0%",
    }
    assert dict(device_rows(USE)) == {
        "GPU use, mean": "91 %",
        "power, mean": "181 W",
        "temperature, mean": "71 °C",
        "clock, mean": "1,725 MHz",
        "samples with a lowered clock": "25.0%",
        "throttle reasons: power limit": "25.0%",
        "CPU use of the process and its workers (100 %: one core)": "130 %",
        "MFU: arithmetic for real tokens / dense peak": "41.2%",
        "energy per sample": "0.568 J",
        "new figure": "3",
    }
