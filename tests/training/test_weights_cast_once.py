"""Autocast's copies of weights in a step of several micro-batches: one for each weight, with equal gradients."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from training.float64 import tiny_run
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

from hwopt.data.batches.step_batch import Step
from hwopt.training.accumulation import forward_and_backward, weights_cast_once

CPU = torch.device("cpu")
MICRO_BATCHES = 3
LAYERS, LINEARS = 2, 7  # linear layers of a layer, beside the output head


class Casts(TorchDispatchMode):
    """Counts the casts of trained parameters."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.weights = {parameter.data_ptr() for parameter in model.parameters() if parameter.requires_grad}
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and args[0].data_ptr() in self.weights:
            self.number += 1
        return func(*args, **(kwargs or {}))


def decoder(adapter: bool) -> Any:
    set_seed(0)
    sizes = {"hidden_size": 256, "num_hidden_layers": LAYERS, "num_attention_heads": 2, "intermediate_size": 512}
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=50, **sizes))
    if adapter:
        model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    return model.train()


def step(model: Any, once: bool) -> tuple[int, list[torch.Tensor]]:
    """The casts of weights in a step of MICRO_BATCHES, and its gradients."""
    set_seed(0)
    model.zero_grad()
    with Casts(model) as casts, weights_cast_once(model, CPU) if once else nullcontext():
        for _ in range(MICRO_BATCHES):
            tokens = torch.randint(50, (2, 9))
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
    return casts.number, [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.* is deprecated:FutureWarning")  # PEFT reads it
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("adapter", [False, True])
def test_weights_are_cast_once_and_gradients_are_equal(adapter: bool, checkpointing: bool) -> None:
    model = decoder(adapter)
    if checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
        model.enable_input_require_grads()
    before, wanted = step(model, once=False)
    after, found = step(model, once=True)
    inside = LAYERS * LINEARS * (2 if adapter else 1)  # adapted layers have two trained matrices
    head = 0 if adapter else 1
    assert before == MICRO_BATCHES * (inside * (1 + checkpointing) + head)
    assert after == (before if checkpointing and not adapter else inside + head)
    assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


@pytest.mark.parametrize(("rows", "times"), [(2, 1), (8, 4)])
def test_loop_casts_once_where_the_plan_accumulates(rows: int, times: int, tmp_path: Path) -> None:
    """A step of 8 rows; the weights of a step of one micro-batch may go as soon as its backward pass has used them."""
    with tiny_run(tmp_path, "text-classification", dtype="float32", batch={"train": rows, "effective": 8}) as run:
        run.model.forward = torch.autocast("cpu", torch.bfloat16)(run.model.forward)
        batch = run.train_loader.dataset[Step(0, 0, tuple(range(8)), 8)]
        with Casts(run.inner_model) as casts:
            forward_and_backward(run, batch, 0 if rows == 2 else 2, lambda *_: None, lambda *_: None)
        number = casts.number
        with Casts(run.inner_model) as casts, torch.autocast("cpu", torch.bfloat16):
            run.inner_model(**next(batch.micro_batches())[0].inputs)
        assert number == times * casts.number > 0
