"""DeepSpeed and FSDP in the arguments: their engine trains as in the unmodified script, and the plan leaves it what it owns."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hosts.scripts import train
from integration.forks import free_port
from transformers import Trainer

import hwopt

AUTO = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto")
ADAMW = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True}}
ZERO = {"zero_optimization": {"stage": 1}, "bf16": {"enabled": "auto"}, "optimizer": ADAMW, **AUTO}


def main(folder: Path) -> None:
    """The script, as it is and with `optimized`: writes the class of the engine and the steps of both."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiling it takes minutes, and one rank does not use it
    found: dict[str, Any] = {}
    for name, cls in (("plain", Trainer), ("ours", hwopt.optimized(Trainer, "cpu", additive="rows"))):
        trainer, steps = train(cls, folder / name, deepspeed=ZERO, use_cpu=False)
        found[name] = [type(trainer.model_wrapped).__name__, steps]
    (folder / "found.json").write_text(json.dumps(found))


@pytest.mark.integration
def test_deepspeed_of_the_arguments_trains_as_in_the_unmodified_script(tmp_path: Path) -> None:
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment = os.environ | ranks | {"DS_ACCELERATOR": "cpu", "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, __file__, str(tmp_path)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["ours"] == found["plain"]
    assert found["ours"][0] == "DeepSpeedEngine"
    why = "deepspeed of your arguments owns model, precision, optimizer and step"
    skipped = {line.split()[2] for line in ended.stdout.splitlines() if why in line}
    assert skipped == {"batch:", "length_batching:", "optimizer:", "precision:"}
    assert "after step 1: active   sdpa" in ended.stdout


if __name__ == "__main__":
    main(Path(sys.argv[1]))
