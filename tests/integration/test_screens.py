"""Whole screens of commands at 80 columns against tests/golden/screen, also with NO_COLOR.

Measured figures and versions are replaced by #. The machine is described, so that decisions do not depend on the CPU.
`HWOPT_UPDATE_GOLDEN=1 pytest tests/integration/test_screens.py` rewrites the files; read the difference before you commit.
"""

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from documented_folder import write_pairs
from golden_files import check_golden
from pinned_torch import IS_PINNED, REASON
from terminals import Screenshot, on_terminal

from hwopt.cli import run_command
from hwopt.hardware.device import Hardware
from hwopt.hardware.doctor import CheckResult

GOLDEN = Path(__file__).parents[1] / "golden" / "screen"
COLUMNS = 80
COMMANDS = {
    "init": ["init", "train.csv", "--yes", "-o", "proposed.toml"],
    "plan": ["plan", "job.toml", "--profile", "card.toml"],
    "run": ["run", "job.toml", "--profile", "card.toml"],
    "evaluate": ["evaluate", "runs/job-card", "test.csv"],
    "doctor": ["doctor"],
}
"""Name -> arguments; in this order in one folder."""
JOB = """[model]
config = { model_type = "bert", hidden_size = 32, num_hidden_layers = 2, num_attention_heads = 2, intermediate_size = 64, \
max_position_embeddings = 64, vocab_size = 200 }

[data]
train = "train.csv"
eval_fraction = 0.2
text = "text"
label = "label"
max_length = 32

[task]
kind = "text-classification"

[training]
max_steps = 12
logging_steps = 4
eval_steps = 6
learning_rate = 1e-3
"""
PROFILE = """name = "card"
summary = "RTX 3070 8 GB: fp16, fused AdamW"

[card]
match = ["GeForce RTX 3070"]
compute_capability = "8.6"
memory_gib = 8

[plugins.precision]
dtype = "fp16"

[plugins.tf32]

[plugins.sdpa]
prefer = ["efficient", "math"]

[plugins.batch]
train = 4
gradient_accumulation_steps = 4

[plugins.optimizer]
name = "adamw_torch_fused"

[plugins.dataloader]
num_workers = 0
"""
MACHINE = Hardware(
    "cpu", "AMD EPYC 9654", 64.0, 61.5, cpu_cores=8, cpu_memory_gib=64.0, cpu_features=("avx512_bf16", "avx2"), compiler="g++"
)
FINDINGS = {
    "driver": CheckResult("ok", "NVIDIA 550.54.14, for CUDA up to 12.4"),
    "torch": CheckResult(
        "problem",
        "torch 2.15.0 is built for CUDA 13.0, but the driver supports CUDA up to 12.4: torch cannot use the GeForce RTX 3070",
        "pip install --index-url https://download.pytorch.org/whl/cu124 'torch>=2.10,<2.16'",
    ),
    "shared memory": CheckResult("warning", "/dev/shm has 0.1 GiB", "docker run --shm-size=8g"),
}

FIGURES = [
    (r"[━╸╺]+", "━"),
    (r"ETA \d+:\d\d:\d\d", "ETA #"),
    (r"\d+\.\d{4}\b", "#.####"),
    (r"[\d.,e-]+ (?=(tok|tokens|samples|steps)/s)", "# "),
    (r"\d[\d.,]* (?=[GM]iB)", "# "),
    (r"[\d.,]+ to [\d.,]+ (m?s|min|h)\b", "# to # s"),
    (r"\d[\d.]* (?=m?s\b)(?:ms|s)", "# s"),
    (r"(data[ _]wait +)[\d.]+%", r"\1#%"),
    (r"(largest that fits: micro-batch|evaluation batch) [\d,]*\d", r"\1 #"),
    (r"bitsandbytes [\d.]+", "bitsandbytes #"),
]
"""(pattern, replacement) of what differs between two runs or two versions of a library."""


def with_placeholders(text: str) -> str:
    """`text` with # for measured figures and versions."""
    for pattern, replacement in FIGURES:
        text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
    return text


@dataclass(frozen=True)
class Screens:
    """What the commands showed on a terminal, by command."""

    terminal: dict[str, Screenshot]
    without_colour: Screenshot
    """`hwopt doctor` with NO_COLOR."""


@pytest.fixture(scope="module")
def screens(warm: None, tmp_path_factory: pytest.TempPathFactory) -> Screens:
    folder = tmp_path_factory.mktemp("terminal")
    (folder / "job.toml").write_text(JOB)
    (folder / "card.toml").write_text(PROFILE)
    write_pairs(folder / "train.csv", ("text",), 150, seed=0)
    write_pairs(folder / "test.csv", ("text",), 60, seed=1)
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        patched.setenv("HWOPT_CACHE", str(folder / "cache"))
        for module in ("api", "planning.request", "inference.trained_model"):
            patched.setattr(f"hwopt.{module}.detect", lambda *_: MACHINE)
        patched.setattr("hwopt.planning.resolve.detect_host", lambda: MACHINE)
        patched.setattr("hwopt.hardware.doctor.examine", lambda _: FINDINGS)
        terminal = {name: on_terminal(partial(run_command, words), COLUMNS) for name, words in COMMANDS.items()}
        patched.setenv("NO_COLOR", "1")
        without_colour = on_terminal(partial(run_command, COMMANDS["doctor"]), COLUMNS)
    for name, shown in terminal.items():
        assert shown.exit_code == (2 if name == "doctor" else 0), shown.text
    return Screens(terminal, without_colour)


@pytest.mark.parametrize("command", COMMANDS)
def test_screens_match_the_golden_files(screens: Screens, command: str) -> None:
    text = with_placeholders(screens.terminal[command].text)
    if command == "plan" and not IS_PINNED:  # figures have other numbers of digits, and lines fold elsewhere
        pytest.skip(REASON)
    check_golden(GOLDEN / f"{command}-{COLUMNS}.txt", text)


def test_colours_are_used_on_terminals_unless_no_color_is_set(screens: Screens) -> None:
    for command, shown in screens.terminal.items():
        assert (shown.colours == {"default"}) == (command in ("init", "evaluate")), command
    assert screens.without_colour.text == screens.terminal["doctor"].text
    assert screens.without_colour.colours == {"default"}
