"""docs/your-script.md: its script runs, and its table of plugins is what the code says."""

from __future__ import annotations

import json
import os
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


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
def test_script_of_the_page_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import random

    import trl

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    choice = random.Random(0)
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"text": text(choice)}) + "\n" for _ in range(40)))
    llama().save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    small = QUIET | {"save_strategy": "no", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    config = trl.SFTConfig
    monkeypatch.setattr(trl, "SFTConfig", lambda folder, **given: config(folder, **(given | small)))
    (block,) = [block for block in read_page(PAGE).blocks if block.kind == "python"]
    reset()
    scope: dict[str, Any] = {}
    exec(compile(block.text.replace("Qwen/Qwen3-0.6B", str(tmp_path / "model")), block.place, "exec"), scope)
    assert scope["trainer"].state.global_step == QUIET["max_steps"]
    assert json.loads((tmp_path / "out" / "status.json").read_text()) == {"exit_code": 0, "message": "done"}
