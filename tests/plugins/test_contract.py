"""The one contract test: every installed plugin, found through the registry, trained in a tiny run.

A plugin that this machine cannot run is checked for described hardware instead: its decision, recipe and memory.
"""

import json
import pkgutil
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from cases import DAILY
from event_calls import calling
from plugin_cases import all_cases, cases
from pretend_cuda.counters import on_pretend_card
from pydantic import ValidationError
from torch.nn.functional import cross_entropy

import hwopt_plugins
from hwopt.config.aliases import PLUGIN_GROUP
from hwopt.hardware.device import described
from hwopt.plugin import Context, Decision, Evidence, MemorySpec, Plugin, Recipe, RunView, Stage
from hwopt.plugin.registry import Registry
from hwopt.plugin.written import written_by
from hwopt.testing import check_contract_of, entry_of, plan_for, tiny_job, tiny_profile

CARD = described("a card", (8, 6), 24.0)


# bitsandbytes prefers rows of a multiple of 64 elements; the tiny decoder has 32
@pytest.mark.filterwarnings("ignore:inner dimension .* is not aligned for fast kernel:UserWarning")
@pytest.mark.parametrize(
    ("name", "compiled"),
    [*((name, False) for name in Registry().names), pytest.param("compile", True, marks=DAILY)],
    ids=lambda value: value if isinstance(value, str) else "compiled" * value,
)
def test_every_plugin_keeps_the_contract(name: str, compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    its, hardware = cases(name), None
    if name == "compile" and not compiled:
        hardware = its.hardware
    elif its.hardware is not None:
        here = plan_for(tiny_profile(**{name: its.options}), tiny_job(tmp_path / "here", its.kind))
        if entry_of(name, here).decision == "skip" or (on_pretend_card() and not its.pretend):
            hardware = its.hardware
            monkeypatch.setattr(platform, "release", lambda: "6.1.0")  # the described card is not in WSL
    report = check_contract_of(name, tmp_path, its.options, kind=its.kind, beside=its.beside, hardware=hardware)
    assert ("evidence" in report.checked) == (hardware is None)


@pytest.mark.parametrize("name", Registry().names)
def test_every_plugin_writes_what_its_cases_say(name: str) -> None:
    written = written_by(Registry().plugin(name), f"plugin {name!r}")
    assert written.fields, written.why
    assert cases(name).writes in (None, set(written.fields))


INVALID = [pytest.param(name, *case, id=f"{name}: {case[0]}") for name, its in all_cases().items() for case in its.invalid]


@pytest.mark.parametrize(("name", "options", "message"), INVALID)
def test_options_that_contradict_each_other_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(message)):
        Registry().plugin(name).Options.model_validate_json(json.dumps(options))


class Good(Plugin):
    name = "good"
    stage = Stage.LOOP
    effect = "bits"

    def probe(self, context: Context) -> Decision:
        able = context.hardware.can("tf32")
        return Decision.apply(able.reason) if able else Decision.skip(able.reason)

    def apply(self, recipe: Recipe, context: Context) -> None:
        recipe.events.append(calling(on_step_begin=print))

    def evidence(self, run: RunView) -> Evidence:
        return Evidence.active("it is there")


class Impure(Good):
    def apply(self, recipe: Recipe, context: Context) -> None:
        self.calls = getattr(self, "calls", 0) + 1
        (recipe.model_steps if self.calls > 1 else recipe.final_steps).append(print)


class Unpicklable(Good):
    def apply(self, recipe: Recipe, context: Context) -> None:
        recipe.cut = lambda lengths, rows: [[0]]


class Misplaced(Good):
    def memory(self, spec: MemorySpec, context: Context) -> None:
        spec.stand_ins["optimiser"] = print


def check(plugin: type[Plugin], folder: Path, hardware: object = CARD) -> None:
    registry = Registry()
    registry.add(plugin)
    report = check_contract_of("good", folder, registry=registry, hardware=hardware)
    assert report.not_checked == ("evidence", "effect", "resume")


def test_described_hardware_is_checked_without_training(tmp_path: Path) -> None:
    check(Good, tmp_path)
    assert not (tmp_path / "with").exists()


def test_contract_test_fails_for_a_skipped_plugin(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"good is skipped on Tesla T4.*needs compute capability 8.0.*hardware=described"):
        check(Good, tmp_path, described("Tesla T4", (7, 5), 14.7))


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        (Impure, r"apply\(\) must be pure"),
        (Unpicklable, "[Cc]an't (get local|pickle)"),
        (Misplaced, r"stand-ins for \['optimiser'\]"),
    ],
)
def test_contract_test_fails_for_a_broken_plugin(plugin: type[Plugin], message: str, tmp_path: Path) -> None:
    with pytest.raises((AssertionError, AttributeError), match=message):
        check(plugin, tmp_path)


class SlightlyScaledLoss(Good):
    """Declares that only rounding changes, although each loss is a thousandth larger."""

    effect = "rounding"

    def probe(self, context: Context) -> Decision:
        return Decision.apply("works on every machine")

    def apply(self, recipe: Recipe, context: Context) -> None:
        def loss(outputs: Any, targets: Any) -> tuple[Any, int]:
            return 1.001 * cross_entropy(outputs.logits.float(), targets, reduction="sum"), targets.numel()

        recipe.loss = loss


def test_contract_test_finds_a_loss_that_differs_by_more_than_rounding(tmp_path: Path) -> None:
    registry = Registry()
    registry.add(SlightlyScaledLoss)
    with pytest.raises(AssertionError, match="declares effect = 'rounding', but the losses differ"):
        check_contract_of("good", tmp_path, registry=registry)


def test_every_file_and_folder_of_plugins_is_an_entry_point() -> None:
    """The other tests ask the registry, and would pass over a plugin that is missing there."""
    known = {entry_point.value.split(":")[0] for entry_point in metadata.entry_points(group=PLUGIN_GROUP)}
    there = {f"hwopt_plugins.{module.name}" for module in pkgutil.iter_modules(hwopt_plugins.__path__)}
    assert not there - known, "add them to the entry points of pyproject.toml, then run `pip install -e .`"
