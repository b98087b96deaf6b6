"""The first output of a command comes before torch, transformers or numpy is imported, which takes seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from documented_folder import write_pairs

FIRST_OUTPUT = """
import json, os, sys

class First:
    encoding, errors = "utf-8", "strict"

    def write(self, text):
        heavy = sorted({"accelerate", "datasets", "numpy", "pyarrow", "torch", "transformers"} & set(sys.modules))
        os.write(1, json.dumps({"text": text, "heavy": heavy, "modules": len(sys.modules)}).encode())
        os._exit(0)

    def flush(self):
        pass

    def isatty(self):
        return TERMINAL

sys.stdout = sys.stderr = First()
from hwopt.cli import main
main(sys.argv[1:])
"""
JOB = '[model]\nconfig = { model_type = "bert" }\n[data]\ntrain = "train.csv"\n'
COMMANDS = [
    ["run", "job.toml", "--profile", "cpu"],
    ["run", "--profile", "auto"],
    ["bench", "job.toml", "--profile", "cpu"],
    ["plan", "job.toml", "--profile", "t4_16gb"],
    ["plan", "job.toml", "--format", "json"],
    ["tune", "job.toml", "--profile", "cpu"],
    ["plan", "job.toml", "--sample", "1"],
    ["export", "job.toml", "--profile", "cpu", "--to", "accelerate"],
    ["init", "train.csv", "--yes", "-o", "new.toml"],
    ["evaluate", "runs/x", "train.csv"],
    ["predict", "runs/x", "train.csv", "-o", "out.csv"],
    ["doctor", "--report"],
    ["doctor"],
]


@pytest.mark.parametrize("terminal", [False, True], ids=["pipe", "terminal"])
@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_first_output_comes_before_heavy_imports(arguments: list[str], terminal: bool, tmp_path: Path) -> None:
    write_pairs(tmp_path / "train.csv", ("text",), 20, seed=0)
    (tmp_path / "job.toml").write_text(JOB)
    code = FIRST_OUTPUT.replace("TERMINAL", str(terminal))
    done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)
    assert found["heavy"] == []
    assert found["modules"] < 900
    assert found["text"].rstrip().endswith("…")
    assert ("\x1b" in found["text"]) == terminal


def test_json_output_has_only_json_on_standard_output(tmp_path: Path) -> None:
    write_pairs(tmp_path / "train.csv", ("text",), 20, seed=0)
    done = subprocess.run(
        [sys.executable, "-m", "hwopt", "doctor", "--report", "--format", "json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "hardware" in json.loads(done.stdout)
    assert done.stderr == "loading torch …\n"
