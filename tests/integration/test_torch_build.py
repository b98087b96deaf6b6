"""The installed torch for CPUs beside an NVIDIA driver: the management library is a small one, compiled here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

NVML = r"""
#include <string.h>
static char card;
int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = CARDS; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { *handle = &card; return 0; }
int nvmlDeviceGetName(void *handle, char *name, unsigned size) { strcpy(name, "Tesla V100"); return 0; }
int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) { *major = 7; *minor = 0; return 0; }
int nvmlSystemGetDriverVersion(char *version, unsigned size) { strcpy(version, "550.54.15"); return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 12040; return 0; }
"""

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(torch.version.cuda is not None, reason="needs a torch that is built for CPUs"),
    pytest.mark.skipif(sys.platform != "linux" or shutil.which("cc") is None, reason="needs Linux and a C compiler"),
]


def hwopt(folder: Path, cards: int, *arguments: str) -> str:
    """The standard output of a command on a machine with an NVIDIA driver."""
    (folder / "nvml.c").write_text(NVML)
    command = ["cc", f"-DCARDS={cards}", "-shared", "-fPIC", "-o", "libnvidia-ml.so.1", "nvml.c"]
    subprocess.run(command, cwd=folder, check=True)
    visible = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    environment = visible | {"LD_LIBRARY_PATH": str(folder), "COLUMNS": "80", "XDG_CACHE_HOME": str(folder / "cache")}
    done = subprocess.run(
        [sys.executable, "-m", "hwopt", *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


TINY = (
    "--set=model.config={model_type='bert', vocab_size=300, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, "
    "intermediate_size=64}"
)


@pytest.mark.parametrize(
    "arguments",
    [["plan", TINY, "--profile", "v100_16gb"], ["run", TINY, "--profile", "cpu", "--set", "training.max_steps=1"]],
    ids=["plan", "run"],
)
def test_torch_for_cpus_beside_a_card_is_reported_first(arguments: list[str], tmp_path: Path) -> None:
    first = hwopt(tmp_path, 1, *arguments).splitlines()[0]
    release = torch.__version__.partition("+")[0]
    problem = f"PROBLEM: torch {torch.__version__} is built for CPUs, but this machine has an NVIDIA driver (550.54.15)"
    assert first.startswith(problem)
    assert first.endswith(f'pip install --force-reinstall "torch=={release}" --index-url https://download.pytorch.org/whl/cu126')


@pytest.mark.parametrize(("cards", "problem"), [(1, "is built for CPUs"), (0, "")])
def test_torch_for_cpus_beside_a_card_is_in_the_json(cards: int, problem: str, tmp_path: Path) -> None:
    found = json.loads(hwopt(tmp_path, cards, "doctor", "--report", "--format", "json"))["hardware"]["problem"]
    assert problem in found
    assert bool(found) == bool(cards), "a driver without a card is not reported"
