import re
from importlib import metadata
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from applied import Applied

from hwopt.config import entry_points
from hwopt.errors import InputError, PluginError
from hwopt.plugin import API_VERSION, Plugin, PluginOptions, Relations
from hwopt.plugin.registry import PLUGIN_GROUP, Registry, check_contract, contract_members


class Good(Applied):
    name = "good"


def test_built_ins_come_through_entry_points() -> None:
    registry = Registry()
    assert {"adapter", "batch", "precision"} <= set(registry.names)
    for name in registry.names:
        assert registry.plugin(name).name == name
        assert registry.distribution(name).startswith("hwopt ")


def test_unknown_plugin_name_suggests_the_nearest() -> None:
    with pytest.raises(InputError, match="profile.toml:4: no plugin 'optimiser'.*Did you mean 'optimizer'"):
        Registry().plugin("optimiser", "profile.toml:4")


@pytest.mark.parametrize("target", ["no_such_module_anywhere:Lost", "hwopt.plugin:Lost"])
def test_plugin_that_cannot_be_imported_is_named(target: str) -> None:
    registry = Registry([EntryPoint("lost", target, PLUGIN_GROUP)])
    with pytest.raises(PluginError, match=f"'lost'.*cannot be imported.*{target}"):
        registry.plugin("lost")


@pytest.mark.parametrize(
    ("is_source", "command"), [(True, "`pip install -e /"), (False, "`pip install --force-reinstall --no-deps .`")]
)
def test_built_in_whose_module_is_gone_says_how_to_renew_the_metadata(
    is_source: bool, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a source folder, and installed from a wheel."""
    monkeypatch.setattr(entry_points, "__file__", str(tmp_path / "hwopt" / "config" / "entry_points.py"))
    if is_source:
        (tmp_path / "pyproject.toml").touch()
    entry = EntryPoint("lost", "hwopt_plugins.lost:Lost", PLUGIN_GROUP)._for(metadata.distribution("hwopt"))
    with pytest.raises(PluginError, match=f"run {re.escape(command)}"):
        Registry([entry]).plugin("lost")


def test_duplicate_name_names_both_entry_points() -> None:
    points = [EntryPoint("same", "a:A", PLUGIN_GROUP), EntryPoint("same", "b:B", PLUGIN_GROUP)]
    with pytest.raises(PluginError, match="'same'.*a:A.*b:B"):
        Registry(points)
    registry = Registry([])
    registry.add(Good)
    with pytest.raises(PluginError, match="registered already"):
        registry.add(Good)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"api_version": API_VERSION + 1}, "plugin API"),
        ({"relations": Relations(replaces=("model_steps",))}, "expected a slot or a key"),
        ({"relations": Relations(replaces=("optimizer", "batch"))}, "expected a slot or a key"),
        ({"requires": ("batch",)}, "a plugin has no attribute `requires`"),
        ({"effect": "none"}, "`effect` must be bits, rounding or method"),
        ({"name": "other"}, "must be the entry point's name"),
        ({"stage": "MODEL"}, "stage"),
        ({"Options": dict}, "Options"),
        ({"probe": Plugin.probe}, "does not define probe"),
    ],
)
def test_every_broken_rule_is_named(change: dict[str, object], expected: str) -> None:
    broken = type("Broken", (Good,), change)
    with pytest.raises(PluginError, match=f"'good' of author 1.0.*{expected}"):
        check_contract(broken, "good", "author 1.0")


def test_object_that_is_not_a_plugin_is_refused() -> None:
    with pytest.raises(PluginError, match="expected a subclass"):
        check_contract(PluginOptions, "good", "author 1.0")


def test_contract_has_few_members() -> None:
    assert len(contract_members()) <= 16


def test_attribute_that_the_contract_does_not_have_is_refused() -> None:
    typo = type("Typo", (Good,), {"relation": Relations()})
    with pytest.raises(PluginError, match=r"no attribute `relation`. Did you mean 'relations'\?"):
        check_contract(typo, "good", "author 1.0")
    check_contract(type("Own", (Good,), {"_own": 1, "LIMIT": 2, "helper": lambda self: None}), "good", "author 1.0")
