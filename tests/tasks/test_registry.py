"""Tasks are found through entry points, those of other packages too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from installed_task import installed

from hwopt import api
from hwopt.config.job import Job, make_job
from hwopt.config.task_kinds import task_kinds
from hwopt.config.toml import Document
from hwopt.errors import InputError, PluginError
from hwopt.planning.schema import schema
from hwopt.tasks.recognition import recognise
from hwopt.tasks.registry import make_task
from hwopt.testing import TINY_BERT, plan_for, tiny_job, tiny_profile, train_tiny, write_samples

SHOUTED = """
from typing import ClassVar
from hwopt.config.task_kinds import TaskFacts
from hwopt.tasks.recognition import Recognised
from hwopt.tasks.text_classification import TextClassification

class Shouted(TextClassification):
    facts = TaskFacts("shouted", "AutoModelForSequenceClassification", keys=frozenset({"task.class_weights"}))

    @classmethod
    def recognise(cls, table, chosen):
        if "SHOUT" not in table.column_names:
            return "no column is loud"
        return Recognised({"text": ["text"], "label": "SHOUT"}, ("text",), "column 'SHOUT' is loud", rank=9)
"""


def job_of(kind: str, **data: Any) -> Job:
    tables = {"model": {"config": dict(TINY_BERT)}, "data": {"train": "a.csv"} | data, "task": {"kind": kind}}
    return make_job(Document("job.toml", tables)).job


def test_own_tasks_are_entry_points_like_any_other() -> None:
    assert {"causal-lm", "text-classification"} <= set(task_kinds())


def test_unknown_kind_names_the_installed_ones_and_the_nearest() -> None:
    with pytest.raises(InputError, match=r"task\.kind: expected 'causal-lm' or .*Did you mean 'text-classification'\?"):
        job_of("text-clasification")


def test_key_of_another_task_is_refused() -> None:
    with pytest.raises(InputError, match=r"data\.messages belongs to task\.kind = 'causal-lm'"):
        job_of("text-classification", messages="messages")


@pytest.fixture
def shouted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "shouted_task.py").write_text(SHOUTED)
    with installed(tmp_path / "site", monkeypatch, shouted="shouted_task:Shouted"):
        yield tmp_path


def test_task_of_another_package_trains_and_predicts(shouted: Path) -> None:
    job = tiny_job(shouted / "data", "shouted", config=TINY_BERT)
    plan = plan_for(tiny_profile(), job)
    plan = api.with_memory(plan, lambda _: plan, cache=shouted / "cache")
    assert plan.memory is not None
    assert len(train_tiny(plan, shouted).losses) == 3
    report = api.predict(shouted / "run", str(shouted / "data" / "eval.jsonl"), shouted / "out.jsonl", cache=shouted / "cache")
    assert (report.rows, report.predicted) == (12, 12)


def test_task_of_another_package_is_proposed_and_in_the_schema(shouted: Path) -> None:
    path = write_samples(shouted / "loud.jsonl", 20)
    assert recognise(str(path)).kind == "text-classification"
    path.write_text(path.read_text().replace('"label"', '"SHOUT"'))
    found = recognise(str(path))
    assert (found.kind, found.why) == ("shouted", "column 'SHOUT' is loud")
    assert "shouted" in schema("job")["$defs"]["TaskOptions"]["properties"]["kind"]["enum"]


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
        make_task(job_of("broken"))


OTHER = {"kind": "causal-lm", "class_weights": "balanced"}


def test_broken_task_that_a_job_does_not_name_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job sets a key that only some tasks read, so hwopt asks all of them."""
    with installed(tmp_path, monkeypatch, broken="no_such_module:Task"):
        with pytest.raises(InputError, match="task.class_weights belongs to task.kind = "):
            make_job(Document("j", {"model": {"name": "m"}, "data": {"train": "d"}, "task": OTHER}))
        make_job(Document("j", {"model": {"name": "m"}, "data": {"train": "d", "max_length": 8}}))


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
        make_task(job_of("nothing"))
