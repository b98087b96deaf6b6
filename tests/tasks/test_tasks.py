from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from hwopt.config.job import Job
from hwopt.errors import InputError
from hwopt.model.config import load_config
from hwopt.tasks.base import Prepared, refuse_inexact
from hwopt.tasks.registry import make_task


def job_of(**tables: Any) -> Job:
    return Job.model_validate({"model": {"config": {"model_type": "bert"}}, "data": {"train": "a.csv"}} | tables)


def test_task_knows_which_metrics_it_has() -> None:
    classification = make_task(job_of())
    assert classification.kind == "text-classification"
    assert classification.greater_is_better("eval_f1")
    assert not classification.greater_is_better("loss")
    causal = make_task(job_of(task={"kind": "causal-lm"}))
    assert not causal.greater_is_better(causal.default_metric)
    with pytest.raises(InputError, match=r"causal-lm has no metric 'eval_f1'.* It has: eval_loss, eval_perplexity"):
        causal.greater_is_better("eval_f1")


def test_mixtures_of_experts_are_refused() -> None:
    mixtral = AutoConfig.for_model("mixtral", num_local_experts=4)
    model = torch.nn.Linear(1, 1)
    model.config = mixtral  # type: ignore[assignment]
    with pytest.raises(InputError, match=r"mixtral is a mixture of 4 experts.*task\.ignore_router_loss"):
        refuse_inexact(model, job_of())
    refuse_inexact(model, job_of(task={"ignore_router_loss": True}))
    for dense in ("bert", "llama", "qwen3", "gemma3_text", "gemma3", "gpt2"):
        model.config = AutoConfig.for_model(dense)  # type: ignore[assignment]
        refuse_inexact(model, job_of())


def test_batch_norm_is_refused_by_name() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    with pytest.raises(InputError, match="1 is a BatchNorm1d"):
        refuse_inexact(model, job_of())
    refuse_inexact(torch.nn.Sequential(torch.nn.LayerNorm(2)), job_of())


def test_folder_without_weights_is_refused(tmp_path: Path) -> None:
    AutoConfig.for_model("bert").save_pretrained(tmp_path)
    job = job_of(model={"name": str(tmp_path)})
    config = load_config(str(tmp_path), None)
    prepared = Prepared(None, None, None, ("a", "b"))  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"model\.name: .* has no weights in safetensors format, and hwopt does not"):
        make_task(job).load_model(job, config, prepared, {})
