"""CUDA graphs of the micro-batches of a Trainer: the same bits, few launches, out of memory, and passes that stay eager."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from hosts.scripts import Steps, bert, llama, reset, rows, train
from plugin_cases import release_memory
from transformers import Trainer, TrainingArguments

import hwopt
from hwopt_plugins.cuda_graphs.graphed import GraphedForwardBackward

pytestmark = [
    pytest.mark.device("any"),
    pytest.mark.usefixtures("all_values"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # PEFT
]
SWITCH = "activation_checkpointing" if hasattr(TrainingArguments, "activation_checkpointing") else "gradient_checkpointing"
PLUGINS: dict[str, Any] = {"cuda_graphs": {"tokens": 0}, "fused_loss": False, "tf32": False}


def with_dropout() -> Any:
    model = bert()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1
    return model


def with_adapter() -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(llama(), LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1, task_type="CAUSAL_LM"))


def with_input_gradients() -> Any:
    """With the hook that checkpointing needs below an adapter, by transformers itself."""
    model = with_adapter()
    model.enable_input_require_grads()
    return model


CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "last step of an epoch": (bert, {"gradient_accumulation_steps": 5}),
    "stream that ends within a step": (bert, {"data": Dataset.from_list(rows(40)).to_iterable_dataset()}),
    "fp16": (bert, {"fp16": True}),
    "bf16": (with_dropout, {"bf16": True, "gradient_accumulation_steps": 1}),
    "causal": (llama, {}),
    "LoRA": (with_adapter, {"bf16": True}),
    "LoRA, checkpointing": (with_input_gradients, {"bf16": True, SWITCH: True}),
}


def trained(folder: Path, make: Callable[[], Any] = bert, **changes: Any) -> tuple[Any, Steps]:
    trainer_class = hwopt.optimized(Trainer, "rtx3090_24gb", **PLUGINS)
    return train(trainer_class, folder, make, use_cpu=False, max_steps=10, **changes)


def found_of(trainer: Any) -> Any:
    """The evidence of the last step."""
    return next(found for decision, found in trainer._run.found if decision.name == "cuda_graphs")


@pytest.fixture(autouse=True)
def own_process() -> Any:
    yield
    reset()
    release_memory()


@pytest.mark.parametrize("case", CASES)
def test_graphs_change_no_bit(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, changes = CASES[case]
    graphed, steps = trained(tmp_path, make, **changes)
    assert found_of(graphed).status == "active"
    assert graphed._run.forward_backward is None, "freed"
    monkeypatch.setattr(GraphedForwardBackward, "graph_of", lambda *_: None)
    eager, expected = trained(tmp_path, make, **changes)
    assert "0 replayed" in found_of(eager).seen
    assert steps == expected
    for left, right in zip(graphed.model.parameters(), eager.model.parameters(), strict=True):
        assert torch.equal(left.cpu(), right.cpu())


def test_out_of_memory_frees_the_graphs_and_repeats_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, expected = trained(tmp_path)
    replay, calls = torch.cuda.CUDAGraph.replay, []

    def failing(graph: Any) -> None:
        calls.append(graph)
        if len(calls) == 6:
            raise torch.OutOfMemoryError("CUDA out of memory")
        replay(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", failing)
    trainer, steps = trained(tmp_path)
    assert steps == expected
    assert trainer._run.backoff.rung == 0, "micro-batches are as large as before"
    assert found_of(trainer).status == "active", "captured again"


def test_evaluation_out_of_memory_frees_the_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    predict, kept = Trainer.prediction_step, []

    def fail_once(trainer: Any, *positional: Any, **named: Any) -> Any:
        kept.append(len(trainer._run.forward_backward.graphs))
        if len(kept) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return predict(trainer, *positional, **named)

    monkeypatch.setattr(Trainer, "prediction_step", fail_once)
    trainer, _ = trained(tmp_path, eval_strategy="steps", eval_steps=5)
    assert kept[0] > kept[1] == 0
    assert "eval_loss" in trainer.state.log_history[-2]
    assert found_of(trainer).status == "active", "captured again"


def test_module_of_the_user_stays_eager(tmp_path: Path) -> None:
    """Its forward pass may count calls on the host."""

    class Own(torch.nn.Dropout):
        pass

    def make() -> Any:
        model = bert()
        model.dropout = Own(0.0)
        return model

    trainer, _ = trained(tmp_path, make)
    decision = next(entry for entry in trainer._run.plan.entries if entry.name == "cuda_graphs")
    assert "dropout is a Own of yours" in decision.reason
