"""Plans as Python for others: arguments of the Trainer and TRL, and a script whose losses equal those of a run."""

import contextlib
import io
import json
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from hwopt.config.job import make_job
from hwopt.config.toml import Document
from hwopt.configs.python_file import from_python
from hwopt.configs.recognise import view_of
from hwopt.errors import InputError
from hwopt.export.files import exported
from hwopt.hardware.device import described
from hwopt.planning.inputs import Inputs
from hwopt.planning.plan import Plan
from hwopt.testing import TINY_BERT, TINY_LLAMA, WORDS, plan_for, tiny_job, tiny_profile, train_tiny, write_samples

GPU = described("a GPU", (8, 6), 8)
PLUGINS: dict[str, Mapping[str, Any]] = {"optimizer": {"name": "adamw_torch"}, "length_batching": {}}


def saved_model(folder: Path, kind: str) -> str:
    """A folder with a tiny model without dropout, and a tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedTokenizerFast

    names = dict.fromkeys(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(names)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"unk_token": "[UNK]", "eos_token": "[SEP]"}
    if kind == "bert":
        words.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
        special |= {"pad_token": "[PAD]"}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)
    values = {**(TINY_BERT if kind == "bert" else TINY_LLAMA), "vocab_size": len(names)}
    none = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "attention_dropout"), 0.0)
    config = AutoConfig.for_model(values.pop("model_type"), **values | none)
    torch.manual_seed(0)
    (AutoModel if kind == "bert" else AutoModelForCausalLM).from_config(config).save_pretrained(folder)
    return str(folder)


JOBS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "classes": ("bert", "text-classification", {"max_length": 12}),
    "pairs": ("bert", "text-classification", {"text": ["text", "second"]}),
    "texts": ("llama", "causal-lm", {"max_length": 8}),
    "blocks": ("llama", "causal-lm", {"max_length": 16, "blocks": True}),
    "prompts": ("llama", "causal-lm", {"prompt": "text", "completion": "second", "max_length": 14}),
}


def plan_of(name: str, folder: Path, **plugins: Mapping[str, Any]) -> Plan:
    model, kind, data = JOBS[name]
    rows = write_samples(folder / "train.jsonl", 42, pairs=name in ("pairs", "prompts"))
    training = {"max_steps": 8, "learning_rate": 1e-3, "weight_decay": 0.1, "warmup_ratio": 0.3, "logging_steps": 1, "seed": 5}
    tables = {"data": {"train": str(rows), **data}, "task": {"kind": kind}, "training": training}
    job = make_job(Document("a job", tables | {"model": {"name": saved_model(folder / model, model)}}))
    return plan_for(tiny_profile(**PLUGINS | plugins), job)


@pytest.mark.parametrize("name", JOBS)
def test_losses_of_the_script_are_those_of_the_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(name, tmp_path)
    text = exported(plan, "script", cache=tmp_path / "cache")
    expected = train_tiny(plan, tmp_path).losses
    (tmp_path / "train.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        runpy.run_path(str(tmp_path / "train.py"))
    losses = [json.loads(line)["loss"] for line in shown.getvalue().splitlines() if line.startswith("{")]
    assert len(losses) == len(expected) == 8
    assert losses == pytest.approx(expected, rel=1e-5)
    assert "import hwopt" not in text
    assert "left out length_batching" in text
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_script_holds_what_the_plan_turns_on(tmp_path: Path) -> None:
    plan = plan_of("blocks", tmp_path, precision={"dtype": "bf16"}, checkpointing={"layers": "all"}, compile={})
    text = exported(plan, "script", cache=tmp_path / "cache")
    compile(text, "train.py", "exec")
    for line in ("torch.autocast(device.type, torch.bfloat16)", "gradient_checkpointing_enable", "ROWS, MICRO_ROWS = 5, 8, 4"):
        assert line in text


@pytest.mark.parametrize("to", ["trainer", "trl"])
def test_arguments_file_makes_the_arguments_of_the_plan(to: Any, tmp_path: Path) -> None:
    job = tiny_job(tmp_path, "causal-lm", warmup_ratio=0.1, eval_steps=2)
    tables = {"precision": {"dtype": "bf16"}, "checkpointing": {"layers": "all"}, "dataloader": {"num_workers": 3}, "sdpa": {}}
    plan = plan_for(tiny_profile(**tables, length_batching={}), job, hardware=GPU)
    text = exported(plan, to)
    assert "left out length_batching" in text
    view = view_of(from_python(text, "arguments.py"), Inputs())
    expected = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "bf16": True, "dataloader_num_workers": 3}
    expected |= {"max_steps": 3, "eval_strategy": "steps", "gradient_checkpointing": True}
    assert {word: view.value(word) for word in expected} == expected
    fields: dict[str, Any] = {}
    exec(text.replace("bf16=True", "bf16=False, use_cpu=True"), fields)  # this machine has no bf16 of a GPU
    arguments = fields["arguments"]
    assert (arguments.learning_rate, arguments.warmup_steps, arguments.output_dir) == (1e-3, 0.1, "out")
    assert getattr(arguments, "max_length", 32) == 32


def test_arguments_file_names_what_it_leaves_out_of_the_loss(tmp_path: Path) -> None:
    rows = write_samples(tmp_path / "train.jsonl", 8)
    classes = {"kind": "text-classification", "label_smoothing": 0.1, "class_weights": "balanced"}
    tables = {"model": {"config": TINY_BERT}, "data": {"train": str(rows)}, "task": classes}
    job = make_job(Document("a job", tables))
    plan = plan_for(tiny_profile(), job)
    text = exported(plan, "trainer")
    assert "left out task.class_weights" in text
    assert "label_smoothing_factor=0.1" in text
    assert "task.label_smoothing" not in text
    assert "trainer.model_accepts_loss_kwargs = False, which your trainer needs" in " ".join(text.split())
    assert "model_accepts_loss_kwargs" not in exported(plan_for(tiny_profile(batch={"train": 8}), job), "trainer")
    with pytest.raises(InputError, match=r"task\.class_weights: has no code"):
        exported(plan, "script")


def test_arguments_of_trl_train_the_answers_of_conversations_only(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    none = str(tmp_path / "none.jsonl")
    for data, said in (
        ({"train": none, "messages": "turns", "assistant_turns": "last"}, "left out data.assistant_turns = 'last'"),
        ({"train": str(tmp_path / "chats.jsonl")}, "assistant_only_loss=True"),
        ({"train": none}, "left out assistant_only_loss"),
    ):
        job = make_job(Document("a job", {"model": {"config": TINY_LLAMA}, "data": data, "task": {"kind": "causal-lm"}}))
        text = exported(plan_for(tiny_profile(), job), "trl")
        assert said in text
        assert ("assistant_only_loss=True" in text) == ("left out assistant_only_loss" not in text)


def test_script_refuses_what_it_has_no_code_for(tmp_path: Path) -> None:
    plan = plan_for(tiny_profile(neftune={}), tiny_job(tmp_path, "causal-lm"), world_size=2)
    with pytest.raises(InputError, match=r"model\.name: needs .* weights; plugins\.neftune: changes .*; --world-size: "):
        exported(plan, "script")
    text = exported(plan_for(tiny_profile(), tiny_job(tmp_path)), "trl")
    assert "left out task.kind = 'text-classification'" in text
