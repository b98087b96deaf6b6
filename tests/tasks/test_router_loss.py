"""Mixtures of experts: their load-balancing loss is trained as transformers adds it, where a step is one micro-batch."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from hwopt.config.job import JobFile
from hwopt.errors import DoesNotFitError, InputError
from hwopt.testing import TINY_LLAMA, Recorder, plan_for, tiny_job, tiny_profile, train_tiny

MIXTRAL = TINY_LLAMA | {
    "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.5
}  # fmt: skip
WHOLE = {"batch": {"train": 8, "gradient_accumulation_steps": 1}}
"""A step of one micro-batch."""


def job_of(folder: Path, ignore: bool = False, **config: Any) -> JobFile:
    found = tiny_job(folder, "causal-lm", config=MIXTRAL | config)
    task = found.job.task.model_copy(update={"ignore_router_loss": ignore})
    return replace(found, job=found.job.model_copy(update={"task": task}))


class FirstStep(Recorder):
    """Keeps what the model computes in the first training step."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[tuple[dict[str, Any], Any]] = []

    def on_start(self, run: Any) -> None:
        super().on_start(run)
        run.inner_model.register_forward_hook(
            lambda module, args, kwargs, output: self.outputs.append((kwargs, output)) if module.training else None,
            with_kwargs=True,
        )


def test_router_loss_is_added_as_transformers_adds_it(tmp_path: Path) -> None:
    plan = plan_for(tiny_profile(**WHOLE), job_of(tmp_path / "with"))
    assert plan.router_loss == 0.5
    seen = train_tiny(plan, tmp_path / "with", FirstStep())
    without = train_tiny(plan_for(tiny_profile(**WHOLE), job_of(tmp_path / "without", ignore=True)), tmp_path / "without")
    inputs, outputs = seen.outputs[0]
    mask = inputs["attention_mask"]
    assert 0 < mask.sum() < mask.numel(), "padding is not balanced over the experts"
    theirs = load_balancing_loss_func(outputs.router_logits, 4, 2, mask)
    assert isinstance(theirs, torch.Tensor)
    assert seen.losses[0] - without.losses[0] == pytest.approx(0.5 * theirs.item(), rel=1e-5)
    assert seen.losses[1:] != without.losses[1:]


@pytest.mark.parametrize(
    ("plugins", "world_size", "why"),
    [
        ({}, 1, "8 rows a step are several micro-batches of 4"),
        (WHOLE | {"length_batching": {}}, 1, "splits a step by length"),
        (WHOLE | {"pack": {}}, 1, "packs the rows of a step"),
        (WHOLE | {"fused_loss": {}}, 1, "computes the loss without it"),
        (WHOLE, 2, "each rank would balance its own rows"),
    ],
)
def test_router_loss_of_a_split_step_is_refused(plugins: dict[str, Any], world_size: int, why: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"mixture of experts.*{why}.*task\.ignore_router_loss = true"):
        plan_for(replace(tiny_profile(**plugins), chosen=frozenset(plugins)), job_of(tmp_path), world_size=world_size)
    plan_for(tiny_profile(**plugins), job_of(tmp_path, ignore=True), world_size=world_size)


def test_model_without_a_router_loss_needs_no_key(tmp_path: Path) -> None:
    plan = plan_for(tiny_profile(), job_of(tmp_path, router_aux_loss_coef=0.0))
    assert plan.router_loss == 0


def test_step_with_a_router_loss_is_not_split_when_memory_runs_out(tmp_path: Path) -> None:
    class OutOfMemory(FirstStep):
        def on_start(self, run: Any) -> None:
            def refuse(module: Any, args: Any) -> None:
                if module.training:
                    raise torch.OutOfMemoryError("CUDA out of memory, for the test")

            run.inner_model.register_forward_pre_hook(refuse)

    plan = plan_for(tiny_profile(**WHOLE), job_of(tmp_path))
    with pytest.raises(DoesNotFitError, match="Training does not fit"):
        train_tiny(plan, tmp_path, OutOfMemory())
