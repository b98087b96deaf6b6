"""Evidence of an optimization that is on in all ranks but one: rank 0 writes that it is inactive there."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from integration.ranks_folder import BATCH, train, write_job, write_profile
from plugin_cases import LAYERS, cases

from hwopt.testing import TINY_LLAMA

NAMES = ("neftune", "precision", "checkpointing", "optimizer", "schedule")


def test_parts_that_fall_out_on_one_rank_are_inactive(warm: None, tmp_path: Path) -> None:
    parts = {name: cases(name).parts[0] for name in NAMES}
    tables: dict[str, Any] = {name: dict(part.options) for name, part in parts.items()}
    write_job(tmp_path, TINY_LLAMA | {"num_hidden_layers": LAYERS}, "causal-lm", max_steps=4)
    write_profile(tmp_path, {**tables, "batch": BATCH})

    def lose_half() -> None:
        if os.environ["RANK"] == "1":
            for part in parts.values():
                part.patch(pytest.MonkeyPatch(), lambda number: number % 2 == 0)

    run = train(tmp_path, "run", 2, first=lose_half)
    found = {row["name"]: row for row in json.loads((run / "evidence.json").read_text())["plugins"]}
    assert {name: found[name]["status"] for name in parts} == dict.fromkeys(parts, "inactive")
    assert all(found[name]["seen"].startswith("on rank 1: ") for name in parts), found
