from pathlib import Path

import pytest
from documentation import ROOT

from hwopt.config.profile import Profile, load_profile
from hwopt.config.profile_files import profile_files
from hwopt.config.validation import validate
from hwopt.errors import InputError
from hwopt.plugin.registry import Registry

PARENT = """name = "parent"
summary = "the parent"
[training]
weight_decay = 0.01
[plugins.first]
a = 1
b = [1, 2]
[plugins.second]
[plugins.third]
x = 1
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "parent.toml").write_text(PARENT)
    return tmp_path


def load(folder: Path, text: str, *assignments: str) -> Profile:
    (folder / "child.toml").write_text(text)
    return load_profile("child", {path.stem: path for path in folder.glob("*.toml")}, assignments)


def test_profile_inherits_options_order_and_places_of_its_parent(folder: Path) -> None:
    profile = load(
        folder,
        'name = "child"\nextends = "parent"\n[plugins.fourth]\n[plugins.first]\nb = [3]\n[plugins.second]\nenabled = false\n',
    )
    assert dict(profile.plugin_tables()) == {"first": {"a": 1, "b": [3]}, "third": {"x": 1}, "fourth": {}}
    assert [name for name, _ in profile.plugin_tables()] == ["first", "third", "fourth"], "an inherited table keeps its place"
    assert profile.content.training.weight_decay == 0.01
    assert profile.place("plugins", "first", "a").endswith("parent.toml:6")
    assert profile.place("plugins", "first", "b").endswith("child.toml:5")
    assert profile.content.summary == "the parent"


def test_command_line_overrides_profile_options(folder: Path) -> None:
    profile = load(folder, 'name = "child"\nextends = "parent"\n', "plugins.first.a=7", "plugins.third.enabled=false")
    assert dict(profile.plugin_tables()) == {"first": {"a": 7, "b": [1, 2]}, "second": {}}
    assert profile.place("plugins", "first", "a") == "--set"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('name = "child"\nextends = "parnet"', "Did you mean 'parent'"),
        ('name = "child"\nextends = ["parent"]', "expected the name of one profile"),
        ('name = "child"\nextends = "child"', "circle"),
        ('name = "../child"', "name"),
        ('name = "child"\nsumary = "x"', "Did you mean 'summary'"),
        ('name = "child"\n[card]\ncompute_capability = 8.6', "card.compute_capability"),
        ('name = "child"\n[training]\nlearning_rat = 1', "Did you mean 'learning_rate'"),
        ('name = "child"\n[plugins.first]\nenabled = "no"', "expected true or false"),
        ('name = "child"\nplugins = 3', "plugins"),
        ("[card]", "name: is missing"),
    ],
)
def test_bad_profile_is_refused_with_a_hint(folder: Path, text: str, expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        load(folder, text)


def test_unknown_profile_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(InputError, match="Did you mean 'rtx3070_8gb'"):
        load_profile("rtx3070-8gb", profile_files())
    with pytest.raises(InputError, match="no such file"):
        load_profile("./nowhere.toml", profile_files())


BENCHMARKS = [str(path) for path in sorted((ROOT / "benchmarks").rglob("*.toml")) if "[plugins." in path.read_text("utf-8")]
"""Given by path. Those of published measurements are called profile.toml."""


@pytest.mark.parametrize("spec", [*profile_files(), *BENCHMARKS])
def test_every_profile_of_the_repository_is_valid(spec: str) -> None:
    """The name is that of the file, and plugins and options exist, so that the figures of benchmarks can be made again."""
    registry = Registry()
    profile = load_profile(spec, profile_files())
    assert Path(spec).name == "profile.toml" or (profile.name == Path(spec).stem and profile.content.summary)
    for plugin in dict(profile.plugin_tables()).keys() - {"as_published"}:  # a plugin of the benchmarks
        validate(registry.plugin(plugin).Options, profile.document, ("plugins", plugin))
