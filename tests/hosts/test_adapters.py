"""A user's own LoRA model in the hosts: equal bits without PEFT's casts, the flags afterwards, and its price."""

import copy
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hosts.scripts import arguments, llama, padded, reset, rows
from hosts.test_trl import data, sft, tokenizer
from peft import LoraConfig, get_peft_model
from transformers import Trainer

import hwopt
from hwopt.hardware.device import described
from hwopt.hosts.script_plan import Script, plan_for
from hwopt.model.adapters import Outside
from hwopt.plugin.price import price_of

# TRL and PEFT use the names that transformers is about to drop
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*is_gradient_checkpointing.*:FutureWarning", "ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"
)

BF16 = {"precision": {"dtype": "bf16"}, "batch": {"train": 4}}


def lora(**options: Any) -> Any:
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM", **options)
    return get_peft_model(llama(), config)


def layers_of(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "cast_input_dtype_enabled")]


Found = tuple[list[float], list[torch.Tensor], set[bool]]


def watch(model: Any) -> set[bool]:
    """Whether the layers of `model` cast in training, filled while it trains."""
    seen: set[bool] = set()

    def look(layer: Any, inputs: Any) -> None:
        if torch.is_grad_enabled():
            seen.add(bool(layer.cast_input_dtype_enabled))

    for layer in layers_of(model):
        layer.register_forward_pre_hook(look)
    return seen


def in_trainer(folder: Path, options: dict[str, Any]) -> Found:
    model = lora(**options)
    seen, collator = watch(model), partial(padded, classes=False)
    trainer = hwopt.optimized(Trainer, "cpu", **BF16)(model, arguments(folder, max_steps=2), collator, rows())
    trainer.train()
    return [each["loss"] for each in trainer.state.log_history if "loss" in each], list(trainer.model.parameters()), seen


def in_session(folder: Path, options: dict[str, Any]) -> Found:
    model = lora(**options)
    seen, losses = watch(model), []
    with hwopt.session("cpu", model, rows=16, additive="labels", **BF16) as own:
        optimizer = own.optimizer([p for p in model.parameters() if p.requires_grad])
        for begin in (0, 16):
            losses.append(own.accumulate(padded(rows()[begin : begin + 16], classes=False), lambda inputs: model(**inputs).loss))
            optimizer.step()
            optimizer.zero_grad()
            model.generate(input_ids=torch.arange(4)[None], max_new_tokens=1)
    return [float(loss) for loss in losses], list(model.parameters()), seen


@pytest.mark.parametrize("host", [in_trainer, in_session])
def test_own_lora_model_trains_the_same_bits_without_casts(host: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    losses, weights, seen = host(tmp_path / "ours", {})
    assert seen == {False}
    reset()
    monkeypatch.setattr(Outside, "__bool__", lambda flag: True)
    torch.manual_seed(0)
    plain_losses, plain_weights, seen = host(tmp_path / "plain", {})
    assert seen == {True}
    assert losses == plain_losses
    assert all(torch.equal(*pair) for pair in zip(weights, plain_weights, strict=True))


@pytest.mark.parametrize("options", [{"lora_dropout": 0.1}, {"use_dora": True}])
def test_dropout_and_dora_keep_their_casts(options: dict[str, Any], tmp_path: Path) -> None:
    assert in_session(tmp_path, options)[2] == {True}


def test_flags_are_as_before_after_the_session_and_in_a_copy() -> None:
    model = lora()
    with hwopt.session("cpu", model, rows=16, **BF16):
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(layers_of(model)[0]))]
        assert {type(layer.cast_input_dtype_enabled) for layer in layers_of(model)} == {Outside}
    for each in (model, *copies):
        assert {layer.cast_input_dtype_enabled for layer in layers_of(each)} == {True}


def test_model_with_an_adapter_has_a_cheaper_micro_batch() -> None:
    card = described("NVIDIA H100", (9, 0), 80.0)
    found = [
        plan_for(model, "h100_80gb", Script(16, 16, {}, adapter=adapter), {}, hardware=card).plan.context
        for model, adapter in ((llama(), False), (lora(), False), (llama(), True))
    ]
    assert [context.model.frozen for context in found] == [False, True, True]
    whole, *adapted = [price_of(context).token_seconds for context in found]
    assert all(price < whole for price in adapted)


def test_weights_below_an_adapter_are_loaded_in_the_dtype_of_their_file(tmp_path: Path) -> None:
    """In fp32, TRL's default, they would need twice the memory, and autocast computes with bf16 all the same."""
    from trl import SFTTrainer

    llama().to(torch.bfloat16).save_pretrained(tmp_path / "model")
    args = sft(tmp_path)
    args.bf16 = True
    adapter = LoraConfig(r=4, target_modules="all-linear")
    cls = hwopt.optimized(SFTTrainer, "cpu", **BF16)
    trainer = cls(
        str(tmp_path / "model"), args=args, train_dataset=data("text"), processing_class=tokenizer(), peft_config=adapter
    )
    dtypes = {(p.requires_grad, p.dtype) for p in trainer.model.parameters()}
    assert dtypes == {(True, torch.float32), (False, torch.bfloat16)}
