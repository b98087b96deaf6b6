"""Tasks are found through entry points, those of other packages too."""

from __future__ import annotations

from pathlib import Path

import pytest
from installed_task import installed
from task_rows import job_of

from hwopt.errors import InputError, PluginError
from hwopt.tasks.registry import make_task

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
