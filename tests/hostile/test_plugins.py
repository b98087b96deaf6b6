"""Plugins that break their contract end the command with exit code 3; the message names plugin and distribution."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tomlkit
from applied import Applied
from command_line import hwopt
from installed_task import write_metadata

from hwopt.plugin import Context, Decision, Evidence, PluginOptions, Stage
from hwopt.plugin.registry import PLUGIN_GROUP
from hwopt.testing import TINY_BERT, write_samples

FIGURE = ("hostile plugins", "{tests} of {tests} tests: exit 3, plugin and distribution named")


class ThirdParty(Applied):
    """A plugin without effect. Tests derive from it."""

    name = "third_party"
    stage = Stage.LOOP

    class Options(PluginOptions):
        value: int = 1

    def evidence(self, run: Any) -> Evidence:
        return Evidence.active("it is there")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a job of two steps and a profile that uses the plugin of an installed package."""
    monkeypatch.chdir(tmp_path)
    write_metadata(tmp_path / "site", "third_party", {PLUGIN_GROUP: {"third_party": "third_party_module:Thing"}})
    monkeypatch.syspath_prepend(tmp_path / "site")
    write_samples(Path("train.jsonl"), 12)
    job = {
        "model": {"config": TINY_BERT},
        "data": {"train": "train.jsonl", "eval_fraction": 0.25, "max_length": 32},
        "training": {"max_steps": 2, "logging_steps": 1},
    }
    Path("job.toml").write_text(tomlkit.dumps(job))
    plugins = {"batch": {"train": 4}, "dataloader": {"num_workers": 0}, "third_party": {}}
    Path("mine.toml").write_text(tomlkit.dumps({"name": "mine", "plugins": plugins}))
    return tmp_path


def install(monkeypatch: pytest.MonkeyPatch, **content: Any) -> None:
    """Make the plugin of the package one with this `content`."""
    thing = type("Variant", (ThirdParty,), content)
    monkeypatch.setitem(sys.modules, "third_party_module", SimpleNamespace(Thing=thing))


EXPORT = ("export", "job.toml", "--profile", "mine.toml", "--to", "accelerate")
PLAN = ("plan", "job.toml", "--profile", "mine.toml")
RUN = ("run", "job.toml", "--profile", "mine.toml", "--name", "r")


def leave(*_: Any, **__: Any) -> Any:
    raise SystemExit(0)


def boom(*_: Any, **__: Any) -> Any:
    raise RuntimeError("boom")


BROKEN: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "probe exits": (EXPORT, {"probe": leave}),
    "the constructor raises": (EXPORT, {"__init__": boom}),
    "probe returns evidence": (EXPORT, {"probe": lambda *_: Evidence.active("x")}),
    "takes out what others added": (EXPORT, {"apply": lambda self, recipe, context: recipe.batch.clear()}),
    "adds an unknown size": (EXPORT, {"apply": lambda self, recipe, context: recipe.batch.update(no_such=8)}),
    "sets a wrong hyperparameter": (EXPORT, {"apply": lambda self, recipe, context: recipe.training.update(learning_rate=-1)}),
    "memory raises": (PLAN, {"memory": boom}),
    "a final step leaves": (RUN, {"apply": lambda self, recipe, context: recipe.final_steps.append(leave)}),
    "a step of the model returns nothing": (
        RUN,
        {"apply": lambda self, recipe, context: recipe.model_steps.append(lambda model, run: None)},
    ),
    "evidence returns a text": (RUN, {"evidence": lambda *_: "active"}),
}


@pytest.mark.parametrize(("command", "content"), BROKEN.values(), ids=BROKEN)
def test_broken_plugin_is_named(command: Any, content: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, **content)
    done = hwopt(*command, cwd=folder)
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) <= 12
    assert "'third_party'" in done.stderr
    assert "third-party 1.0" in done.stderr
    status = Path("runs/r/status.json")
    assert not status.exists() or json.loads(status.read_text())["exit_code"] == 3


def test_output_of_a_plugin_is_not_in_stdout(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def loud(what: str, found: Any) -> Any:
        print(f"in {what}")
        return found

    def apply(self: Any, recipe: Any, context: Context) -> None:
        recipe.model_steps.append(lambda model, run: loud("a step of the model", model))
        recipe.final_steps.append(lambda model, run: loud("a final step", model))

    hooks = {"probe": Decision.apply("always works"), "memory": None, "evidence": Evidence.active("it is there")}
    install(monkeypatch, apply=apply, **{name: lambda *_, name=name: loud(name, hooks[name]) for name in hooks})
    ran, planned = (hwopt(*command, cwd=folder) for command in (RUN, PLAN))
    assert (ran.returncode, planned.returncode) == (0, 0), ran.stderr + planned.stderr
    for where in (*hooks, "a step of the model", "a final step"):
        assert f"in {where}" not in ran.stdout + planned.stdout
        assert f"in {where}" in ran.stderr + planned.stderr
