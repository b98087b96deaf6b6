"""Tests for plugins, built-in and third-party: the contract test, and tiny jobs and runs for other tests.

Example:

from hwopt.testing import check_contract_of


def test_contract(tmp_path):
    check_contract_of("my_plugin", tmp_path, options={"strength": 2})
"""

from __future__ import annotations

from hwopt.testing.plugin_contract import ContractReport, check_contract_of, entry_of
from hwopt.testing.tiny_run import (
    COLOURS,
    TINY_BERT,
    TINY_LLAMA,
    TINY_T5,
    TINY_VIT,
    WORDS,
    Recorder,
    finished,
    launcher,
    logged,
    plan_for,
    relative_error,
    rewound,
    saved_bits,
    tiny_job,
    tiny_profile,
    train_tiny,
    write_photos,
    write_samples,
)

__all__ = [
    "COLOURS",
    "TINY_BERT",
    "TINY_LLAMA",
    "TINY_T5",
    "TINY_VIT",
    "WORDS",
    "ContractReport",
    "Recorder",
    "check_contract_of",
    "entry_of",
    "finished",
    "launcher",
    "logged",
    "plan_for",
    "relative_error",
    "rewound",
    "saved_bits",
    "tiny_job",
    "tiny_profile",
    "train_tiny",
    "write_photos",
    "write_samples",
]
