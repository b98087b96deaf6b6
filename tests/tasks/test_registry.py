"""Tasks are found through entry points, those of other packages too."""

from pathlib import Path
from typing import Any

import pytest
from cases import DAILY, named
from installed_task import installed
from task_rows import job_of

from hwopt.config.job import Job
from hwopt.errors import InputError, PluginError
from hwopt.model.config import load_config
from hwopt.tasks.registry import make_task
from hwopt.testing import plan_for, tiny_job, tiny_profile, train_tiny

DATA = {"train": "a.csv"}


def test_unknown_kind_names_the_installed_ones_and_the_nearest() -> None:
    with pytest.raises(InputError, match=r"task\.kind: expected 'causal-lm' or .*Did you mean 'text-classification'\?"):
        job_of("text-clasification", DATA)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"broken": "no_such_module:Task"}, r"task 'broken' of some-tasks 1\.0 cannot be imported \(no_such_module:Task\)"),
        ({"broken": "json:dumps"}, "expected a subclass of hwopt.tasks.base.Task"),
        ({"broken": "hwopt.tasks.causal_lm:CausalLM"}, "the kind in its facts is 'causal-lm'"),
        ({"causal_lm": "json:dumps"}, "'causal-lm' is registered by .* and again by .*; uninstall one of them"),
    ],
    ids=["import", "class", "name", "twice"],
)
def test_broken_task_is_an_error_that_names_its_package(
    entry: dict[str, str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with installed(tmp_path, monkeypatch, **entry), pytest.raises(PluginError, match=message):
        make_task(job_of("broken", DATA))


def test_broken_task_that_a_job_does_not_name_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job sets a key that only some tasks read, so hwopt asks all of them."""
    with installed(tmp_path, monkeypatch, broken="no_such_module:Task"):
        with pytest.raises(InputError, match="task.class_weights belongs to task.kind = "):
            job_of("causal-lm", DATA, class_weights="balanced")
        job_of("causal-lm", {**DATA, "max_length": 8})


INCOMPLETE = """
from hwopt.config.task_kinds import TaskFacts
from hwopt.tasks.base import Task

class Nothing(Task):
    facts = TaskFacts("nothing", "AutoModel")
"""


def test_incomplete_task_is_refused_by_the_missing_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nothing_task.py").write_text(INCOMPLETE)
    with (
        installed(tmp_path, monkeypatch, nothing="nothing_task:Nothing"),
        pytest.raises(PluginError, match=r"Nothing.*does not define samples\(\)"),
    ):
        make_task(job_of("nothing", DATA))


def job_with(**tables: Any) -> Job:
    return Job.model_validate({"model": {"config": {"model_type": "bert"}}, "data": {"train": "a.csv"}} | tables)


def test_task_knows_which_metrics_it_has() -> None:
    classification = make_task(job_with())
    assert classification.kind == "text-classification"
    assert classification.greater_is_better("eval_f1")
    assert not classification.greater_is_better("loss")
    causal = make_task(job_with(task={"kind": "causal-lm"}))
    assert not causal.greater_is_better(causal.default_metric)
    with pytest.raises(InputError, match=r"causal-lm has no metric 'eval_f1'.* It has: eval_loss, eval_perplexity"):
        causal.greater_is_better("eval_f1")


@pytest.mark.parametrize("vocabulary", named({"trained": {}, "given": {"vocab_size": 90}}, ("trained",), DAILY))
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
