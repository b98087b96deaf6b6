from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hwopt.config.job import Job
from hwopt.errors import InputError
from hwopt.model.config import load_config
from hwopt.tasks.registry import make_task
from hwopt.testing import plan_for, tiny_job, tiny_profile, train_tiny


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


@pytest.mark.parametrize("vocabulary", [{}, {"vocab_size": 90}], ids=["trained", "given"])
@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "modernbert", "global_attn_every_n_layers": 2},
        {"model_type": "deberta-v2", "relative_attention": True, "position_buckets": 8, "norm_rel_ebd": "layer_norm"},
    ],
    ids=lambda config: config["model_type"],
)
def test_encoder_with_special_tokens_of_its_published_tokenizer_trains(
    config: dict[str, Any], vocabulary: dict[str, int], tmp_path: Path
) -> None:
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    job = tiny_job(tmp_path / "data", config=config | size | vocabulary, max_steps=2)
    train_tiny(plan_for(tiny_profile(), job), tmp_path)
    saved = load_config(str(tmp_path / "run" / "final"), None)
    assert 0 <= saved.pad_token_id < saved.vocab_size
    assert saved.vocab_size <= vocabulary.get("vocab_size", 8_000)
