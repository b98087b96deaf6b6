"""A loss without whole logits in the training steps of a Trainer: losses, norms, evaluation, and where it is left out."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hosts.scripts import Log, Steps, arguments, farthest, llama, memory_of, padded, reset, rows
from transformers import Trainer

import hwopt
from hwopt.hosts.limits import lacks_of

# PEFT uses the name that transformers is about to drop
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")

FUSED = {"batch": {"train": 4}, "precision": {"dtype": "fp32"}, "fused_loss": {"backend": "torch", "chunks": 3}}


def lora(**options: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    return get_peft_model(llama(), LoraConfig(r=4, task_type="CAUSAL_LM", **options))


def with_input_gradients() -> Any:
    """A model that keeps a list of its own hooks, as under checkpointing of the Trainer."""
    model = llama()
    model.enable_input_require_grads()
    return model


def with_head() -> Any:
    """A model whose output layer the user's adapter trains."""
    return lora(target_modules=["q_proj", "lm_head"])


def steps(cls: Any, folder: Path, make: Any = llama, limit: int | None = None, **changes: Any) -> tuple[Any, Steps]:
    """The trainer and its steps. It evaluates with logits after step 2."""
    reset()
    shapes: list[Any] = []

    def metrics(found: Any) -> dict[str, float]:
        shapes.append(found.predictions.shape)
        return {"highest": float(found.predictions.max())}

    model, log = make(), Log()
    if limit is not None:
        model.register_forward_pre_hook(memory_of(limit), with_kwargs=True)
    args = arguments(folder, **({"max_steps": 4, "eval_strategy": "steps", "eval_steps": 2} | changes))
    collator, same = partial(padded, classes=False), [row | {"input_ids": row["input_ids"][:4]} for row in rows(8)]
    trainer = cls(model, args, collator, rows(), same, compute_metrics=metrics, callbacks=[log])
    trainer.train()
    assert {shape[-1] for shape in shapes} == {200}, "logits of all tokens of the vocabulary"
    return trainer, log.steps


def entry(trainer: Any) -> Any:
    return next(each for each in trainer._run.plan.entries if each.name == "fused_loss")


@pytest.mark.parametrize(
    ("make", "limit", "changes"),
    [
        (llama, None, {}),
        (llama, 150, {}),
        (with_input_gradients, None, {}),
        (partial(lora, target_modules="all-linear"), None, {}),
    ],
)
def test_losses_and_norms_are_those_of_whole_logits(
    make: Any, limit: int | None, changes: dict[str, Any], tmp_path: Path
) -> None:
    plain, wanted = steps(Trainer, tmp_path / "plain", make, **changes)
    trainer, found = steps(hwopt.optimized(Trainer, "cpu", **FUSED), tmp_path / "ours", make, limit, **changes)
    assert farthest(found, wanted) < 1e-6
    evidence = {decision.name: each for decision, each in trainer._run.found}["fused_loss"]
    assert evidence.status == "active"
    assert "0 on whole logits" in evidence.seen
    ours, theirs = ([row for row in each.state.log_history if "eval_loss" in row] for each in (trainer, plain))
    assert [row["eval_highest"] for row in ours] == pytest.approx([row["eval_highest"] for row in theirs], rel=1e-5)
    assert "forward" not in vars(trainer._run.inner_model), "the model is as before"


def test_output_layer_that_an_adapter_trains_keeps_its_logits(tmp_path: Path) -> None:
    trainer, _ = steps(hwopt.optimized(Trainer, "cpu", **FUSED), tmp_path, with_head, max_steps=2)
    assert entry(trainer).decision == "skip"
    assert "If an adapter trains it" in entry(trainer).reason


def test_step_that_is_not_split_and_not_counted_has_it_too(tmp_path: Path) -> None:
    changes = {"max_steps": 2, "average_tokens_across_devices": False, "neftune_noise_alpha": 1e-9}
    _, wanted = steps(Trainer, tmp_path / "plain", **changes)
    trainer, found = steps(hwopt.optimized(Trainer, "cpu", **FUSED), tmp_path / "ours", **changes)
    assert farthest(found, wanted) < 1e-6
    assert not trainer._split.is_split
    assert entry(trainer).decision == "apply"


class Reads(Trainer):
    def compute_loss(self, *positional: Any, **named: Any) -> Any:
        return super().compute_loss(*positional, **named)


@pytest.mark.parametrize(
    ("cls", "changes", "given", "reason"),
    [
        (Reads, {}, {}, "Reads.compute_loss() computes the loss"),
        (Trainer, {"label_smoothing_factor": 0.1}, {}, "label_smoothing_factor of your arguments needs the logits"),
        (Trainer, {}, {"compute_loss_func": print}, "compute_loss_func is yours"),
        (Trainer, {"use_liger_kernel": True}, {}, "use_liger_kernel of your arguments"),
    ],
)
def test_where_logits_are_read_it_is_left_out(cls: Any, changes: Any, given: Any, reason: str, tmp_path: Path) -> None:
    args = arguments(tmp_path, **changes)
    assert lacks_of(cls, args, given)["loss"].startswith(reason)
    assert "loss" not in lacks_of(Trainer, arguments(tmp_path), {})
