"""Plugins that break their contract end the run with exit code 3; the message names plugin and distribution."""

import json
import sys
import types
from collections.abc import Callable
from importlib import metadata
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tomlkit
from command_line import hwopt

from hwopt.plugin import Context, Decision, Evidence, Plugin, PluginOptions, Recipe, Stage
from hwopt.plugin import registry as registry_module
from hwopt.plugin.registry import PLUGIN_GROUP
from hwopt.testing import TINY_BERT, write_samples

DISTRIBUTION = "third-party-tools 1.2"
FIGURE = ("hostile plugins", "{tests} of {tests} tests: exit 3, plugin and distribution named")


class ThirdParty(Plugin):
    """A plugin without effect. Tests derive from it."""

    name = "third_party"
    stage = Stage.LOOP

    class Options(PluginOptions):
        value: int = 1

    def probe(self, context: Context) -> Decision:
        return Decision.apply("always works")

    def evidence(self, run: Any) -> Evidence:
        return Evidence.active("it is there")


class Distribution(NamedTuple):
    name: str = "third-party-tools"
    version: str = "1.2"


class ThirdPartyEntryPoint(EntryPoint):
    """An entry point of a distribution that is not installed."""

    dist = Distribution()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a job of two steps and a profile that uses the plugin."""
    monkeypatch.chdir(tmp_path)
    write_samples(Path("train.jsonl"), 12)
    job = {
        "model": {"config": TINY_BERT},
        "data": {"train": "train.jsonl", "eval_fraction": 0.25, "max_length": 32},
        "training": {"max_steps": 2, "logging_steps": 1},
    }
    Path("job.toml").write_text(tomlkit.dumps(job))
    Path("mine.toml").write_text(
        'name = "mine"\nplugins.batch = { train = 4 }\nplugins.dataloader = { num_workers = 0 }\nplugins.third_party = {}\n'
    )
    return tmp_path


def install(monkeypatch: pytest.MonkeyPatch, thing: object, name: str = "third_party") -> None:
    """Register `thing` as the entry point `name`, as if its distribution were installed."""
    module = types.ModuleType("third_party_module")
    module.__dict__["Thing"] = thing
    monkeypatch.setitem(sys.modules, module.__name__, module)
    found = ThirdPartyEntryPoint(name, "third_party_module:Thing", PLUGIN_GROUP)
    installed = list(metadata.entry_points(group=PLUGIN_GROUP))
    asked = metadata.entry_points

    def entry_points(**options: str) -> Any:
        return [*installed, found] if options == {"group": PLUGIN_GROUP} else asked(**options)

    monkeypatch.setattr(registry_module.metadata, "entry_points", entry_points)


EXPORT = ("export", "job.toml", "--profile", "mine.toml", "--to", "accelerate")
PLAN = ("plan", "job.toml", "--profile", "mine.toml")
RUN = ("run", "job.toml", "--profile", "mine.toml", "--name", "r")


def refused(*arguments: str) -> None:
    done = hwopt(*arguments, cwd=Path())
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) <= 12
    assert "'third_party'" in done.stderr
    assert DISTRIBUTION in done.stderr


def variant(**content: Any) -> type[Plugin]:
    return type("Variant", (ThirdParty,), content)


def raising(error: BaseException) -> Callable[..., Any]:
    def hook(*_: Any, **__: Any) -> Any:
        raise error

    return hook


def returning(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def writes(how: Callable[[Any], Any]) -> type[Plugin]:
    return variant(apply=lambda self, recipe, context: how(recipe))


CLASSES: dict[str, type[Plugin]] = {
    "probe exits": variant(probe=raising(SystemExit(0))),
    "the constructor raises": variant(__init__=raising(RuntimeError("boom"))),
    "probe returns evidence": variant(probe=returning(Evidence.active("x"))),
    "takes out what others added": writes(lambda recipe: recipe.batch.clear()),
    "adds an unknown size": writes(lambda recipe: recipe.batch.update(no_such=8)),
    "sets a wrong hyperparameter": writes(lambda recipe: recipe.training.update(learning_rate=-1)),
}


@pytest.mark.parametrize("thing", CLASSES.values(), ids=CLASSES)
def test_broken_plugin_is_refused_before_the_run(thing: type[Plugin], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, thing)
    refused(*EXPORT)


def loud(what: str, hook: Callable[..., Any]) -> Callable[..., Any]:
    """`hook`, which prints `what` first."""

    def printing(*arguments: Any) -> Any:
        print(f"in {what}")
        return hook(*arguments)

    return printing


def test_output_of_a_plugin_is_not_in_stdout(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def apply(self: Any, recipe: Recipe, context: Context) -> None:
        recipe.model_steps.append(loud("a step of the model", lambda model, run: model))
        recipe.final_steps.append(loud("a final step", lambda model, run: model))

    hooks = {"probe": ThirdParty.probe, "memory": returning(None), "apply": apply, "evidence": ThirdParty.evidence}
    install(monkeypatch, variant(**{name: loud(name, hook) for name, hook in hooks.items()}))
    ran, planned = (hwopt(*command, cwd=folder) for command in (RUN, PLAN))
    assert (ran.returncode, planned.returncode) == (0, 0), ran.stderr + planned.stderr
    for where in (*hooks, "a step of the model", "a final step"):
        assert f"in {where}" not in ran.stdout + planned.stdout
        assert f"in {where}" in ran.stderr + planned.stderr


leave = raising(SystemExit(0))
RUNS: dict[str, type[Plugin]] = {
    "a final step leaves": writes(lambda recipe: recipe.final_steps.append(leave)),
    "a step of the model returns nothing": writes(lambda recipe: recipe.model_steps.append(lambda model, run: None)),
    "evidence returns a text": variant(evidence=returning("active")),
}


@pytest.mark.parametrize("thing", RUNS.values(), ids=RUNS)
def test_failing_hook_ends_the_run(thing: type[Plugin], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, thing)
    refused(*RUN)
    status = Path("runs/r/status.json")
    assert not status.exists() or json.loads(status.read_text())["exit_code"] == 3


def test_failing_memory_hook_names_the_plugin(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, variant(memory=raising(RuntimeError("boom"))))
    refused(*PLAN)
