"""docs/your-script.md: its script runs, and its table of plugins is what the code says."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from documentation import read_page
from hosts.scripts import llama, reset
from hosts.test_trl import QUIET, text, tokenizer

from hwopt.hosts.trainer import HARMLESS, LACKS
from hwopt.plugin.registry import Registry
from hwopt.plugin.written import written_by

PAGE = Path(__file__).parents[2] / "docs" / "your-script.md"
BEGIN, END = "<!-- plugins in a Trainer -->\n", "<!-- end -->"


def table() -> str:
    registry = Registry()
    lines = ["| plugin | in a Trainer |", "|---|---|"]
    for name in sorted(registry.names):
        fields = written_by(registry.plugin(name), name).fields or ()
        lacking = [reason for field, reason in LACKS.items() if field in fields and field not in HARMLESS]
        lines.append(f"| `{name}` | {f'skipped: {lacking[0]}' if lacking else 'yes'} |")
    return "\n".join([*lines, ""])


def test_table_of_plugins_is_what_the_code_says() -> None:
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    page = f"{before}{BEGIN}{table()}{END}{rest.partition(END)[2]}"
    if os.environ.get("HWOPT_UPDATE_GOLDEN"):
        PAGE.write_text(page, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == page


@pytest.fixture
def name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A small model, in a folder with the page's data."""
    import trl

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    choice = random.Random(0)
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"text": text(choice)}) + "\n" for _ in range(40)))
    llama().save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    small = QUIET | {"save_strategy": "no", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}

    class SmallConfig(trl.SFTConfig):
        def __init__(self, folder: str = "out", **given: Any) -> None:
            super().__init__(given.pop("output_dir", folder), **(given | small))

    SmallConfig.__name__ = "SFTConfig"
    monkeypatch.setattr(trl, "SFTConfig", SmallConfig)
    reset()
    return str(tmp_path / "model")


def run_block(heading: str, name: str) -> dict[str, Any]:
    """The names that the page's script below `heading` leaves, run with the model `name`."""
    page = read_page(PAGE)
    begin = PAGE.read_text(encoding="utf-8").splitlines().index(heading)
    block = next(block for block in page.blocks if block.kind == "python" and block.line > begin)
    scope: dict[str, Any] = {}
    exec(compile(block.text.replace("Qwen/Qwen3-0.6B", name).replace('"rtx3090_24gb"', '"cpu"'), block.place, "exec"), scope)
    return scope


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
def test_script_of_the_page_trains(name: str, tmp_path: Path) -> None:
    scope = run_block("# In your own script", name)
    assert scope["trainer"].state.global_step == QUIET["max_steps"]
    assert json.loads((tmp_path / "out" / "status.json").read_text()) == {"exit_code": 0, "message": "done"}


@pytest.mark.parametrize("heading", ["## An Accelerate script", "## A loop of your own, or Fabric"])
def test_loop_of_the_page_trains(heading: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_block(heading, name)["loss"].isfinite()
    output = capsys.readouterr().out
    assert "apply    length_batching" in output
    assert "after step 1: active   optimizer" in output


def test_own_module_of_the_page_trains(name: str) -> None:
    scope = run_block("## Your own module in hwopt's loop", name)
    assert scope["summary"]["step"] == 16
    assert 0 <= scope["summary"]["eval_accuracy"] <= 1


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
def test_single_parts_of_the_page(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    scope = run_block("## One part of it", name)
    assert scope["args"].max_length == 512
    assert scope["keywords"]["attn_implementation"] == "sdpa"
    output = capsys.readouterr().out
    assert "precision: bf16 = True" in output
    assert "on Tesla T4" in output
    assert "64 rows fit" in output
