"""Scripts as entries: what is read from the syntax tree, and what only a run of the script knows."""

from pathlib import Path
from typing import Any

import pytest

from hwopt.configs.check.checker import Given, check_file
from hwopt.configs.python_file import from_python
from hwopt.configs.recognise import read_source, view_of
from hwopt.configs.view import View
from hwopt.planning.inputs import Inputs

INPUTS = Inputs()
SCRIPT = """\
import os
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import SFTConfig

ROWS, LR = 4, 1e-4
STEPS = 8
rate: float = 2e-3
common = dict(warmup_steps=10, **{"seed": 7})
quantized = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
model = AutoModelForCausalLM.from_pretrained(
    os.environ["MODEL"], attn_implementation="sdpa", torch_dtype=torch.float32, quantization_config=quantized
)
model.config.use_cache = False
args = SFTConfig(
    "out",
    gradient_accumulation_steps=STEPS,
    learning_rate=rate,  # not 1e-4
    bf16=torch.cuda.is_bf16_supported(),
    gradient_checkpointing_kwargs={"use_reentrant": False},
    report_to=["none"],
    max_steps=-1,
    **common,
)
for seed in range(3):
    other = SFTConfig("other", seed=seed, max_steps=9)
"""


def view(text: str) -> View:
    return view_of(from_python(text, "train.py"), INPUTS)


def values(found: View) -> dict[str, Any]:
    return {word: setting.value for word, setting in found.settings.items()}


def test_arguments_of_a_script_are_read_with_their_lines_and_comments() -> None:
    found = view(SCRIPT)
    assert values(found) == {
        "use_cache": False, "output_dir": "out", "gradient_accumulation_steps": 8, "learning_rate": 2e-3, "seed": 7,
        "gradient_checkpointing_kwargs.use_reentrant": False, "report_to": ["none"], "max_steps": -1, "warmup_steps": 10,
        "load_in_4bit": True, "bnb_4bit_compute_dtype": "bfloat16", "attn_implementation": "sdpa", "torch_dtype": "float32",
    }  # fmt: skip
    assert found.recognised_by == "SFTConfig (the first of 2 calls), BitsAndBytesConfig, from_pretrained"
    assert (found.settings["learning_rate"].place, found.settings["learning_rate"].comment) == ("train.py:18", "not 1e-4")
    assert found.settings["seed"].place == "train.py:9"
    assert {each.key: each.place for each in found.unread if each.kind == "interpolation"} == {
        "bf16": "train.py:19",
        "from_pretrained.model_name_or_path": "train.py:12",
    }
    assert found.line("bf16", True) == "bf16=True"


@pytest.mark.parametrize(
    ("before", "value"),
    [
        ("x = 1\nx = 2", "x"),  # assigned twice
        ("for x in range(3): pass", "x"),
        ("", "2 ** 9 ** 9"),
        ("", "0 if debug else 1"),
    ],
)
def test_value_that_only_a_run_knows_is_listed_and_not_guessed(before: str, value: str) -> None:
    found = view(f"{before}\nTrainingArguments('out', seed={value}, fp16=True)\n")
    assert "seed" not in found
    assert [each.key for each in found.unread if each.kind == "interpolation"] == ["seed"]
    assert not found.lacks("seed")


def test_unknown_keywords_and_an_adapter_of_the_script_silence_rules_about_absence(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("args = TrainingArguments('out', load_in_4bit=True)\n")
    assert "quantized-training" in {each.rule for each in check_file(path, Given(), INPUTS).findings}
    path.write_text("from peft import get_peft_model\n" + path.read_text())
    assert "quantized-training" not in {each.rule for each in check_file(path, Given(), INPUTS).findings}
    assert view("TrainingArguments('out', **options, fp16=True)").unread[0].key == "**"


UNSLOTH = """
from trl import SFTTrainer
from transformers import TrainingArguments
from unsloth import FastLanguageModel
model, tokenizer = FastLanguageModel.from_pretrained("m", load_in_4bit=True)
model = FastLanguageModel.get_peft_model(model, r=8, lora_alpha=32, use_gradient_checkpointing="unsloth")
trainer = SFTTrainer(model, tokenizer=tokenizer, args=TrainingArguments("out"))
"""


def test_script_of_unsloth_has_an_adapter_and_its_own_trainer(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(UNSLOTH)
    assert "refused-keyword" not in {each.rule for each in check_file(path, Given(), INPUTS).findings}
    found = view_of(read_source(path), INPUTS)
    assert (found.value("lora_r"), found.value("lora_alpha"), found.is_on("use_peft")) == (8, 32, True)
    assert found.is_on("gradient_checkpointing")


STYLES = """\
@dataclass
class Config:
    epochs: int = field(default=2)
    seed = 5
parser.add_argument("--learning-rate", type=float, default=8 * 1e-4)
parser.add_argument("--max_steps", default=None)
TABLE = {"run": dict(rows=16), "decay": 0.1}
own = {"fp16": True, "bf16": False}
own["bf16"] = chosen_when_it_runs()
def train(warmup_steps=30, steps=4):
    train(steps=8) if nested else TrainingArguments(
        "o", num_train_epochs=config.epochs, seed=Config.seed, learning_rate=args.learning_rate, max_steps=args.max_steps,
        per_device_train_batch_size=TABLE["run"]["rows"], weight_decay=TABLE["decay"], gradient_accumulation_steps=steps, **own)
def main(warmup_steps=30, save_steps=60):
    mp.spawn(run, args=(1,))
def run(eval_steps=7):
    ...
fire.Fire(main)
trainer = TrainingArguments("o", save_steps=save_steps, eval_steps=eval_steps)
"""


def test_fields_options_keys_and_defaults_of_functions_are_resolved_where_the_script_sets_them_once() -> None:
    found = view(STYLES)
    assert values(found) == {
        "output_dir": "o", "num_train_epochs": 2, "seed": 5, "learning_rate": 8e-4, "per_device_train_batch_size": 16,
        "weight_decay": 0.1, "fp16": True,
    }  # fmt: skip
    unread = {each.key for each in found.unread_as("interpolation")}
    assert unread == {"max_steps", "gradient_accumulation_steps", "bf16"}
    last = values(view(STYLES.partition("fire.Fire(main)\n")[2] + STYLES))
    assert last == {"output_dir": "o", "save_steps": 60}


@pytest.mark.parametrize(
    ("before", "given", "value"),
    [
        ("class C:\n    lr = 1e-2\nc = C(lr=2e-5)", "learning_rate=c.lr", None),
        ("class C:\n    lr = 1e-2\nclass D(C):\n    x = 1\nc = D(2e-5)", "learning_rate=c.lr", None),
        ("class C:\n    lr = 1e-2\nc = replace(C(), lr=2e-5)", "learning_rate=c.lr", None),
        ("p.add_argument('--lr', default=1e-2)\np.set_defaults(lr=2e-5)", "learning_rate=a.lr", None),
        ("p.add_argument('--rate', '-r', dest='lr', default=1e-2)", "learning_rate=a.lr", 1e-2),
        ("p.add_argument('-l', '--lr', '--rate', default=1e-2)", "learning_rate=a.lr", 1e-2),
        ("t = {'a': {'lr': 1e-2}}\nt['a']['lr'] = 2e-5", "learning_rate=t['a']['lr']", None),
        ("t = {'learning_rate': 1e-2}\nt.update(other)", "**t", None),
        ("t = {'learning_rate': 1e-2}\nt.update(bf16=True)", "**t", 1e-2),
        ("t = {'learning_rate': 1e-2}", "**{**t, 'learning_rate': 2e-5}", 2e-5),
        ("t = {'learning_rate': 1e-2}", "**{**t, **other}", None),
        ("t = {'learning_rate': 1e-2}", "**dict(t, bf16=True)", 1e-2),
        ("from settings import t\nt = {**t, 'learning_rate': 1e-2}", "**t", None),
    ],
)
def test_value_that_the_script_may_change_is_not_guessed(before: str, given: str, value: float | None) -> None:
    assert view(f"{before}\nTrainingArguments('o', {given})").value("learning_rate") == value
