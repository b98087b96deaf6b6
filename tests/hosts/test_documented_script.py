"""docs/your-script.md: its script runs, and its table of plugins is what the code says."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from documentation import read_page
from golden_files import check_part
from hosts.scripts import llama
from hosts.test_trl import QUIET, text, tokenizer

from hwopt.hosts.apply import MODEL_LACKS, SAVED_MODEL, makes_another_model
from hwopt.hosts.limits import NOT_ADDITIVE, OWN_PARTS_LACK, SCRIPT_LACKS, STEP_FIELDS, TRAINER_LACKS
from hwopt.planning.parts import why_lacking
from hwopt.plugin.registry import Registry
from hwopt.plugin.written import written_by

PAGE = Path(__file__).parents[2] / "docs" / "your-script.md"
BEGIN, END = "<!-- plugins in each host -->\n", "<!-- end -->"
HOSTS = {
    "`optimized`": TRAINER_LACKS,
    "`Accelerator`, `session`": dict.fromkeys(STEP_FIELDS, NOT_ADDITIVE) | SCRIPT_LACKS,
    "`train(model=…)`": OWN_PARTS_LACK,
    "`apply`": MODEL_LACKS,
    "`hwopt run`": {},
}
"""Column -> field of the recipe, or key, that the host has no place for -> why."""


def table() -> str:
    """Plugins x hosts, and a numbered list of the reasons."""
    registry, reasons = Registry(), dict[str, int]()
    lines = [f"| plugin | {' | '.join(HOSTS)} |", "|---" * (1 + len(HOSTS)) + "|"]
    for name in sorted(registry.names):
        cells = []
        for lacks in HOSTS.values():
            written = written_by(registry.plugin(name), name, lacks)
            found = list(filter(None, why_lacking(lacks, written.keys)))
            if lacks is MODEL_LACKS and makes_another_model(written.fields or ()):
                found.append(SAVED_MODEL)
            reason = next(iter(found), None)
            arguments = lacks is TRAINER_LACKS and "trainer" in (written.fields or ())
            fine = "for a name" if arguments else "yes"
            cells.append(fine if reason is None else f"no ({reasons.setdefault(reason, len(reasons) + 1)})")
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"{number}. {reason}" for reason, number in reasons.items()), ""])


def test_table_of_plugins_is_what_the_code_says() -> None:
    check_part(PAGE, BEGIN, table(), END)


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
    return str(tmp_path / "model")


def run_block(heading: str, name: str, number: int = 0) -> dict[str, Any]:
    """The names that script `number` below `heading` of the page leaves, run with the model `name`."""
    page = read_page(PAGE)
    begin = PAGE.read_text(encoding="utf-8").splitlines().index(heading)
    block = [block for block in page.blocks if block.kind == "python" and block.line > begin][number]
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
    assert "a step of 64 rows fits" in output


def test_plugins_on_a_model_of_the_page(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    scope = run_block("## One part of it", name, number=1)
    assert scope["loss"].isfinite()
    assert "apply    fused_loss" in capsys.readouterr().out
