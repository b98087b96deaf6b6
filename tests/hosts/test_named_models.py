"""An adapter and quantized weights of the plan, where TRL's trainer loads the model by its name."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import DAILY
from hosts.scripts import Log, Steps, farthest, llama, reset
from hosts.test_trl import SPLIT, data, sft, tokenizer

import hwopt

# TRL and PEFT use the names that transformers is about to drop
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")

ADAPTER = {"kind": "lora", "r": 4, "lora_alpha": 8, "target_modules": "all-linear", "always": True}


def lora(**changes: Any) -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", **changes)


def steps(cls: Any, folder: Path, resume: str | None = None, changes: Any = None, **given: Any) -> tuple[Any, Steps]:
    """The trainer, and its steps with a model that is given by name."""
    reset()
    if not (folder.parent / "model").exists():
        llama().save_pretrained(folder.parent / "model")
    args, log = sft(folder), Log()
    args.save_strategy, args.save_steps = "steps", 2
    for name, value in (changes or {}).items():
        setattr(args, name, value)
    rows = data("prompt", "completion")
    model = str(folder.parent / "model")
    trainer = cls(model=model, args=args, train_dataset=rows, processing_class=tokenizer(), callbacks=[log], **given)
    trainer.train(resume_from_checkpoint=resume)
    return trainer, log.steps


def test_adapter_of_the_plan_trains_as_the_same_peft_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from trl import SFTTrainer

    _, wanted = steps(SFTTrainer, tmp_path / "plain", peft_config=lora())
    trainer, found = steps(hwopt.optimized(SFTTrainer, "cpu", adapter=ADAPTER, **SPLIT), tmp_path / "ours")
    assert farthest(found, wanted) < 1e-6
    evidence = {decision.name: each.status for decision, each in trainer._run.found}
    assert evidence["adapter"] == "active"
    output = capsys.readouterr().out
    assert "apply    adapter: lora r=4 on all-linear" in output
    assert "so other weights are trained; adapter=False leaves it out" in output
    checkpoint = str(tmp_path / "ours" / "checkpoint-2")
    _, resumed = steps(SFTTrainer, tmp_path / "resumed", resume=checkpoint, peft_config=lora())
    assert farthest(resumed, wanted[2:]) < 1e-5


def test_peft_config_of_the_user_wins(tmp_path: Path) -> None:
    from trl import SFTTrainer

    cls = hwopt.optimized(SFTTrainer, "cpu", adapter=ADAPTER | {"r": 8}, **SPLIT)
    trainer, _ = steps(cls, tmp_path / "ours", peft_config=lora())
    assert trainer.model.peft_config["default"].r == 4
    entry = next(each for each in trainer._run.plan.entries if each.name == "adapter")
    assert (entry.decision, entry.reason) == ("skip", "peft_config is yours")


@pytest.mark.parametrize("own", [False, pytest.param(True, marks=DAILY)])
def test_quantized_weights_below_the_adapter(own: bool, tmp_path: Path) -> None:
    """`own`: the adapter is the user's."""
    from transformers import BitsAndBytesConfig
    from trl import SFTTrainer

    four = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.float32
    )
    _, wanted = steps(SFTTrainer, tmp_path / "plain", peft_config=lora(), quantization_config=four)
    options = {"adapter": ADAPTER, "quantize": {"bits": 4, "dtype": "fp32"}, **SPLIT}
    cls = hwopt.optimized(SFTTrainer, "cpu", **options)
    trainer, found = steps(cls, tmp_path / "ours", **({"peft_config": lora()} if own else {}))
    assert farthest(found, wanted) < 1e-2, "TRL trains such an adapter in bf16"
    evidence = {decision.name: each.status for decision, each in trainer._run.found}
    assert evidence["quantize"] == "active"
    assert ("adapter" in evidence) is not own


@pytest.mark.integration
def test_quantization_of_the_user_wins_and_a_model_that_is_loaded_has_neither(tmp_path: Path) -> None:
    from trl import SFTTrainer

    options = {"adapter": ADAPTER, "quantize": {"bits": 4, "dtype": "fp32"}, **SPLIT}
    own: Any = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}
    make = partial(hwopt.optimized, SFTTrainer, "cpu", **options)
    trainer, _ = steps(make(), tmp_path / "ours", changes={"model_init_kwargs": own, "max_steps": 1})
    kinds = {type(module).__name__ for module in trainer.model.modules()}
    assert "Linear8bitLt" in kinds
    reasons = {each.name: each.reason for each in trainer._run.plan.entries if each.decision == "skip"}
    assert reasons["quantize"] == "quantization_config is yours"
    reset()
    trainer = make()(llama(), args=sft(tmp_path), train_dataset=data("text"), processing_class=tokenizer())
    reasons = {each.name: each.reason for each in trainer._run.plan.entries if each.decision == "skip"}
    assert reasons["adapter"] == reasons["quantize"]
    assert reasons["adapter"].startswith("the model is loaded already; pass its name")


def test_adapter_that_a_profile_has_by_default_is_left_out_for_a_small_model(tmp_path: Path) -> None:
    from trl import SFTTrainer

    llama().save_pretrained(tmp_path / "model")
    cls = hwopt.optimized(SFTTrainer, "rtx3090_24gb", **SPLIT)
    trainer = cls(str(tmp_path / "model"), args=sft(tmp_path), train_dataset=data("text"), processing_class=tokenizer())
    entry = next(each for each in trainer._run.plan.entries if each.name == "adapter")
    assert "fewer than 500 M" in entry.reason
    assert not hasattr(trainer.model, "peft_config")
    cls = hwopt.optimized(SFTTrainer, "rtx3070_8gb_qlora", **SPLIT)
    trainer = cls(str(tmp_path / "model"), args=sft(tmp_path), train_dataset=data("text"), processing_class=tokenizer())
    entry = next(each for each in trainer._run.plan.entries if each.name == "quantize")
    assert entry.reason.startswith("needs plugin 'adapter'")
