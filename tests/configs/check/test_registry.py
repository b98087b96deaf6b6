"""Rules of third parties, found through the entry-point group `hwopt.rules`."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import EntryPoint
from types import ModuleType

import pytest

from hwopt.configs.check import Facts, Finding, View, rule
from hwopt.configs.check.checker import RULE_GROUP, check, installed_rules
from hwopt.configs.recognise import view_of
from hwopt.configs.source_file import from_yaml
from hwopt.errors import PluginError
from hwopt.planning.inputs import Inputs


@rule("seed-zero", "information", source="a test", words=("seed",))
def seed_zero(view: View, facts: Facts) -> Iterator[Finding]:
    """The seed is 0."""
    if view.number("seed") == 0:
        yield Finding("seed", "seed is 0.", "Many files have it.", view.line("seed", 1))


def entry(name: str, value: object, monkeypatch: pytest.MonkeyPatch) -> EntryPoint:
    module = ModuleType(f"third_{name}")
    module.value = value
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return EntryPoint(name, f"{module.__name__}:value", RULE_GROUP)


def view(text: str) -> View:
    return view_of(from_yaml(text, "config.yaml", "YAML"), Inputs())


def test_third_party_rule_is_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = installed_rules([entry("mine", seed_zero, monkeypatch)])
    (found,) = check(view("training:\n  seed: 0\n"), Facts(), rules).findings
    assert (found.rule, found.place, found.key) == ("seed-zero", "config.yaml:2", "training.seed")
    assert found.fix == "training.seed: 1"
    assert not check(view("seed: 3\n"), Facts(), rules).findings


def test_rule_that_raises_is_named() -> None:
    def broken(view: View, facts: Facts) -> Iterator[Finding]:
        raise KeyError("x")

    rules = [replace(seed_zero, name="broken", function=broken)]
    with pytest.raises(PluginError, match="rule 'broken': .* raised KeyError"):
        check(view("seed: 0\n"), Facts(), rules)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([seed_zero, replace(seed_zero, level="error")], r"registered by .*entry0.* and again by .*entry1"),
        ([[seed_zero, "x"]], r"expected a hwopt\.configs\.check\.Rule"),
    ],
)
def test_what_is_not_one_rule_of_each_name_is_refused(
    values: list[object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = [entry(f"entry{number}", value, monkeypatch) for number, value in enumerate(values)]
    with pytest.raises(PluginError, match=message):
        installed_rules(entries)
    with pytest.raises(PluginError, match="rules 'gone'.*no_such_module"):
        installed_rules([EntryPoint("gone", "no_such_module:x", RULE_GROUP)])
