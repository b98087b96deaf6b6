"""What comes before torch, transformers or numpy is imported, which takes seconds: listings, the first output, bad input."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from documented_folder import write_pairs
from hostile.test_input import check_message

from hwopt.testing import finished

HEAVY = ("accelerate", "datasets", "numpy", "pyarrow", "pydantic", "torch", "transformers")
LISTING = f"""
import contextlib, io, json, sys
from hwopt.cli import run_command
with contextlib.redirect_stdout(io.StringIO()):
    code = run_command(sys.argv[1:])
print(json.dumps([code, sorted(set(sys.modules) & set({HEAVY}))]))
"""
FIRST_OUTPUT = f"""
import json, os, sys

class First:
    encoding, errors = "utf-8", "strict"

    def write(self, text):
        heavy = sorted(set({HEAVY}) - {{"pydantic"}} & set(sys.modules))
        os.write(1, json.dumps({{"text": text, "heavy": heavy, "modules": len(sys.modules)}}).encode())
        os._exit(0)

    def flush(self):
        pass

    def isatty(self):
        return TERMINAL

sys.stdout = sys.stderr = First()
from hwopt.cli import main
main(sys.argv[1:])
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a valid job, and a pipe that would never end."""
    monkeypatch.chdir(tmp_path)
    write_pairs(Path("train.csv"), ("text",), 20, seed=0)
    Path("job.toml").write_text('[model]\nconfig = { model_type = "bert" }\n[data]\ntrain = "train.csv"\n')
    os.mkfifo("a_pipe.toml")
    return tmp_path


def printed(code: str, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL)


@pytest.mark.parametrize(
    ("arguments", "allowed"), [(["--help"], set()), (["profiles"], set()), (["plugins", "list"], {"pydantic"})]
)
def test_listings_import_no_heavy_package(arguments: list[str], allowed: set[str]) -> None:
    """Imports take most of the start-up time; benchmarks/startup.py measures it."""
    code, imported = json.loads(printed(LISTING, arguments).stdout)
    assert code == 0
    assert set(imported) <= allowed


COMMANDS = [
    *("run job.toml --profile cpu", "run --profile auto", "bench job.toml --profile cpu", "plan job.toml --profile t4_16gb"),
    *("plan job.toml --format json", "tune job.toml --profile cpu", "export job.toml --profile cpu --to accelerate"),
    *("init train.csv --yes -o new.toml", "evaluate runs/x train.csv", "predict runs/x train.csv -o out.csv", "doctor"),
]
ON_TERMINAL = COMMANDS[:1]


@pytest.mark.parametrize(
    ("command", "terminal"), [*((each, False) for each in COMMANDS), *((each, True) for each in ON_TERMINAL)]
)
def test_first_output_comes_before_heavy_imports(command: str, terminal: bool) -> None:
    found = json.loads(printed(FIRST_OUTPUT.replace("TERMINAL", str(terminal)), command.split()).stdout)
    assert found["heavy"] == []
    assert found["modules"] < 900
    assert found["text"].rstrip().endswith("…")
    assert ("\x1b" in found["text"]) == terminal


def test_json_output_has_only_json_on_standard_output(folder: Path) -> None:
    done = finished([sys.executable, "-m", "hwopt", "doctor", "--report", "--format", "json"], folder)
    assert "hardware" in json.loads(done.stdout)
    assert done.stderr == "loading torch …\n"


BAD = [
    *("run no-such.toml --profile cpu", "run job.toml --profile cpu --set training.learning_rat=1", "plan a_pipe.toml"),
    "run job.toml --profile cpu --set plugins.dataloader.num_workers=-1 --processes 2",
]
WITHOUT_TORCH = "import sys; from hwopt.cli import run_command; print(run_command(sys.argv[1:]), 'torch' in sys.modules)"


@pytest.mark.parametrize("command", BAD)
def test_bad_input_is_reported_before_torch_is_imported(command: str) -> None:
    found = printed(WITHOUT_TORCH, command.split())
    assert found.stdout == "2 False\n"
    check_message(found.stderr)


NO_NEW_INTERPRETER = """
import subprocess, sys
from hwopt.cli import main

start = subprocess.Popen.__init__

def started(self, command, *args, **options):
    assert command[0] != sys.executable, command
    start(self, command, *args, **options)

subprocess.Popen.__init__ = started
main(sys.argv[1:])
"""


def test_plan_for_another_card_imports_torch_once_and_traces_in_a_fork() -> None:
    found = printed(NO_NEW_INTERPRETER, ["plan", "job.toml", "--profile", "rtx3070_8gb", "--set", "model.config.hidden_size=96"])
    assert "forecast: from a simulated step" in found.stdout
