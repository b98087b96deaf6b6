"""Rules of third parties, found through the entry-point group `hwopt.rules`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import EntryPoint
from types import ModuleType

import pytest

from hwopt.configs.check import Facts, Finding, View, rule
from hwopt.configs.check.checker import RULE_GROUP, check, installed_rules
from hwopt.errors import PluginError


@rule("seed-zero", "information", source="a test", words=("seed",))
def seed_zero(view: View, facts: Facts) -> Iterator[Finding]:
    """The seed is 0."""
    if view.number("seed") == 0:
        yield Finding("seed", "seed is 0.", "Many files have it.", view.line("seed", 1))


@rule("broken", "error", source="a test")
def broken(view: View, facts: Facts) -> Iterator[Finding]:
    """A rule that raises."""
    raise KeyError("x")
    yield


def entry(name: str, value: object, monkeypatch: pytest.MonkeyPatch) -> EntryPoint:
    module = ModuleType(f"third_{name}")
    module.value = value  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return EntryPoint(name, f"{module.__name__}:value", RULE_GROUP)


def view_of(text: str) -> View:
    from hwopt.configs.recognise import view_of as made
    from hwopt.configs.source_file import from_yaml
    from hwopt.planning.inputs import Inputs

    return made(from_yaml(text, "config.yaml", "YAML"), Inputs())


def test_third_party_rule_is_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = installed_rules([entry("mine", seed_zero, monkeypatch)])
    report = check(view_of("training:\n  seed: 0\n"), Facts(), rules)
    (found,) = report.findings
    assert (found.rule, found.place, found.key, found.fix) == (
        "seed-zero",
        "config.yaml:2",
        "training.seed",
        "training.seed: 1",
    )
    assert not check(view_of("seed: 3\n"), Facts(), rules).findings


def test_rule_that_raises_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = installed_rules([entry("mine", [broken], monkeypatch)])
    with pytest.raises(PluginError, match="rule 'broken': .* raised KeyError"):
        check(view_of("seed: 0\n"), Facts(), rules)


def test_two_rules_of_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    other = replace(seed_zero, level="error")
    entries = [entry("one", seed_zero, monkeypatch), entry("two", other, monkeypatch)]
    with pytest.raises(PluginError, match=r"registered by .*one.* and again by .*two"):
        installed_rules(entries)


@pytest.mark.parametrize("value", [3, [seed_zero, "x"], "text"])
def test_what_is_no_rule_is_refused(value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PluginError, match=r"expected a hwopt\.configs\.check\.Rule"):
        installed_rules([entry("mine", value, monkeypatch)])


def test_rule_that_cannot_be_imported_is_named() -> None:
    with pytest.raises(PluginError, match="rules 'gone'.*no_such_module"):
        installed_rules([EntryPoint("gone", "no_such_module:x", RULE_GROUP)])
