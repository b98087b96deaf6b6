"""Scripts that TRL installs: two changed lines train the same, and the unmodified script resumes the checkpoint."""

import difflib
import json
import runpy
import sys
from importlib import util
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from hosts.scripts import llama, reset
from hosts.test_trl import data, tokenizer
from transformers import set_seed

# TRL and PEFT use the names that transformers is about to drop
pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"),
]

STEPS = 6
ARGUMENTS = f"""--model_name_or_path model --dataset_name data --max_steps {STEPS} --logging_steps 1 --save_steps {STEPS // 2}
    --per_device_train_batch_size 4 --gradient_accumulation_steps 2 --learning_rate 1e-3 --use_cpu --bf16 False
    --report_to none --disable_tqdm True"""
OPTIONS = 'batch={"train": 3}, precision={"dtype": "fp32"}'
LORA = "--use_peft --lora_r 4 --lora_dropout 0"
GROUPS = "--num_generations 4 --max_completion_length 4 --reward_funcs hosts.test_others_scripts.variety"


def variety(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The reward of grpo.py."""
    return [float(len(set(each))) for each in completion_ids]


def rows(kind: str) -> Dataset:
    columns = {"dpo": ("prompt", "chosen", "rejected"), "reward": ("chosen", "rejected"), "grpo": ("prompt",)}
    found = data(*columns.get(kind, ("prompt", "completion")))
    return found.add_column("label", [number % 3 > 0 for number in range(64)]) if kind == "kto" else found


def changed(text: str, kind: str) -> str:
    """The script with hwopt: its import, and the class that is called."""
    cls = {"sft": "SFT", "dpo": "DPO", "kto": "KTO", "grpo": "GRPO", "reward": "Reward"}[kind] + "Trainer"
    found = text.replace("import argparse\n", "import argparse\nimport hwopt\n", 1)
    found = found.replace(f"trainer = {cls}(", f'trainer = hwopt.optimized({cls}, "cpu", {OPTIONS})(')
    lines = list(difflib.ndiff(text.splitlines(), found.splitlines()))
    assert sum(line.startswith("+ ") for line in lines) == 2
    assert sum(line.startswith("- ") for line in lines) == 1
    return found


def history(script: Path, folder: str, more: str, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, float]]:
    """What the last checkpoint of `script` says of its steps."""
    reset()
    set_seed(0)  # of new layers: a process of its own starts with one seed
    with monkeypatch.context() as patched:
        patched.setattr(sys, "path", [*sys.path])
        patched.setattr(sys, "argv", [str(script), *f"{ARGUMENTS} --output_dir {folder} {more}".split()])
        runpy.run_path(str(script), run_name="__main__")
    state = json.loads(Path(folder, f"checkpoint-{STEPS}", "trainer_state.json").read_text())
    found: list[dict[str, float]] = [row for row in state["log_history"] if "loss" in row]
    assert [row["step"] for row in found] == [*range(1, STEPS + 1)]
    return found


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        pytest.param("sft", "", id="sft"),
        pytest.param("sft", LORA, id="sft-lora"),
        *(pytest.param(kind, "", id=kind, marks=pytest.mark.daily) for kind in ("dpo", "reward", "kto")),
        pytest.param("grpo", GROUPS, id="grpo", marks=pytest.mark.daily),
    ],
)
def test_script_of_trl_trains_the_same(
    kind: str, more: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    found = util.find_spec("trl.scripts." + kind)
    assert found
    assert found.origin
    text = Path(found.origin).read_text(encoding="utf-8")
    Path("changed.py").write_text(changed(text, kind), encoding="utf-8")
    llama().save_pretrained("model")
    tokenizer().save_pretrained("model")
    Path("data").mkdir()
    rows(kind).to_json("data/train.jsonl")

    plain = history(Path(found.origin), "plain", more, monkeypatch)
    capsys.readouterr()
    ours = history(Path("changed.py"), "ours", more, monkeypatch)
    output = capsys.readouterr().out
    assert ("a step is split by length" in output) == (kind in ("sft", "dpo", "reward"))
    resumed = history(Path(found.origin), "resumed", f"{more} --resume_from_checkpoint ours/checkpoint-{STEPS // 2}", monkeypatch)
    for steps in (ours, resumed):
        for key in ("loss", "grad_norm"):
            assert [row[key] for row in steps] == pytest.approx([row[key] for row in plain], rel=1e-5)
