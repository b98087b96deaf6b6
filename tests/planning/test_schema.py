"""The JSON Schemas for editors: they accept what hwopt accepts, and mark what it refuses."""

import json
import tomllib
from pathlib import Path
from typing import Any

import example_plugins
import pytest

from hwopt.config.job import Data, Job, TaskOptions
from hwopt.config.job_model import Model
from hwopt.config.job_training import Training
from hwopt.config.profile_files import profile_files
from hwopt.planning.schema import schema
from hwopt.plugin.registry import Registry

jsonschema = pytest.importorskip("jsonschema", reason="in the extra `test`")

JOB = {"model": {"name": "bert"}, "data": {"train": "train.csv"}}


def problems(which: Any, document: dict[str, Any]) -> list[str]:
    found = jsonschema.Draft202012Validator(schema(which)).iter_errors(document)
    return [f"{error.json_path}: {error.message}" for error in found]


@pytest.mark.parametrize("which", ["job", "profile"])
def test_schema_is_valid_and_has_a_table_for_each_plugin(which: Any) -> None:
    found = schema(which)
    jsonschema.Draft202012Validator.check_schema(found)
    tables = found["properties"]["plugins"]["properties"]
    assert list(tables) == Registry().names
    for name, table in tables.items():
        options = Registry().plugin(name).Options.model_fields
        assert set(table["properties"]) == {*options, "enabled"}
        assert table["title"] == name
        assert table["description"]


def test_every_installed_profile_is_valid() -> None:
    files = profile_files()
    assert len(files) > 20
    found = {name: problems("profile", tomllib.loads(path.read_text(encoding="utf-8"))) for name, path in files.items()}
    assert {name: each for name, each in found.items() if each} == {}


@pytest.mark.parametrize(
    ("tables", "problem"),
    [
        ({}, ""),
        ({"data": {"train": "x.csv", "text": "review"}}, ""),
        ({"data": {"train": "x.csv", "text": ["premise", "hypothesis"]}}, ""),
        ({"data": {"train": "x.csv", "text": ["a", "b", "c"]}}, "$.data.text"),
        ({"data": {"trian": "x.csv"}}, "$.data: Additional properties"),
        ({"data": {"train": "x.csv", "max_length": 1}}, "$.data.max_length"),
        ({"task": {"kind": "causal-lm"}}, ""),
        ({"task": {"kind": "translation"}}, "$.task.kind"),
        ({"training": {"learning_rate": "fast"}}, "$.training.learning_rate"),
        ({"plugins": {"batch": {"train": 8}}}, ""),
        ({"plugins": {"batch": {"enabled": False}}}, ""),
        ({"plugins": {"batch": {"trian": 8}}}, "$.plugins.batch: Additional properties"),
        ({"plugins": {"bacth": {}}}, "$.plugins: Additional properties"),
        ({"modle": {}}, "$: Additional properties"),
    ],
)
def test_job_is_checked(tables: dict[str, Any], problem: str) -> None:
    found = problems("job", JOB | tables)
    assert bool(found) == bool(problem)
    assert not problem or any(each.startswith(problem) for each in found)


def test_docstrings_of_the_keys_are_descriptions() -> None:
    tables = schema("job")["$defs"]
    assert tables["Data"]["properties"]["max_length"]["description"] == "In tokens; longer texts are cut."
    assert tables["Training"]["properties"]["max_grad_norm"]["description"] == "0: no clipping."
    assert set(tables) >= {model.__name__ for model in (Data, Model, TaskOptions, Training)}
    assert set(Job.model_fields) < set(schema("job")["properties"])


@pytest.mark.parametrize("which", ["job", "profile"])
def test_schema_has_no_null_and_refers_only_to_itself(which: Any) -> None:
    text = json.dumps(schema(which))
    assert '"null"' not in text
    assert '"default": null' not in text
    used = {part.split('"')[0] for part in text.split('"#/$defs/')[1:]}
    assert used == set(schema(which)["$defs"])


def test_third_party_plugin_has_its_table() -> None:
    table = schema("job", example_plugins.registry())["properties"]["plugins"]["properties"]["ema"]
    assert "decay" in table["properties"]


def test_command_prints_the_schema(tmp_path: Path) -> None:
    from command_line import hwopt

    assert json.loads(hwopt("check", "--schema", "job", cwd=tmp_path).stdout) == schema("job")
    found = hwopt("check", "--schema", "plan", cwd=tmp_path)
    assert found.returncode == 2
    assert "'plan' is not one of 'job', 'profile'" in found.stderr
