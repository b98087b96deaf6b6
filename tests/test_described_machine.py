"""No test asks the machine on which it runs: detection answers a described CPU, and the questions themselves fail."""

import importlib
import subprocess
import sys

import described_machine
import pytest
import torch

from hwopt.hardware import detect
from hwopt.system.atomic_folder import shutil

EXPECTED = ("cpu", "Described CPU", 24.0, 20.0, 2, ("avx512_bf16", "avx2"))
ASKED = """
from hwopt.hardware.detect import detect
found = detect()
print((found.device_type, found.name, found.memory_gib, found.free_memory_gib, found.cpu_cores, found.cpu_features))
"""


def test_detection_answers_the_described_machine() -> None:
    found = detect.detect()
    fields = (found.device_type, found.name, found.memory_gib, found.free_memory_gib, found.cpu_cores, found.cpu_features)
    assert fields == EXPECTED
    assert found.problem == ""
    assert shutil.disk_usage("/") == described_machine.DISK
    assert torch.get_num_threads() == 1


@pytest.mark.integration
def test_processes_that_tests_start_detect_the_described_machine() -> None:
    done = subprocess.run([sys.executable, "-c", ASKED], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == repr(EXPECTED)


@pytest.mark.parametrize("name", sorted(set(described_machine.ANSWERS) - {"cpu_name", "with_layer_speed"}))
def test_hwopts_question_to_the_real_machine_fails(name: str) -> None:
    importlib.import_module("torch.cpu")
    with pytest.raises(AssertionError, match=r"hwopt\.hardware\.detect asks this machine"):
        described_machine.real[name]()


@pytest.mark.parametrize(
    ("module", "question"), [(module, name) for module, names in described_machine.QUESTIONS.items() for name in names]
)
def test_question_of_a_test_to_the_real_machine_fails(module: str, question: str) -> None:
    ask = getattr(importlib.import_module(module), question, None)
    if ask is not None:
        with pytest.raises(AssertionError, match="asks this machine"):
            ask(0) if question == "sched_getaffinity" else ask()
