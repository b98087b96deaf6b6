"""Configuration files as entries with lines and comments."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwopt.configs.source_file import SourceFile, from_json, from_toml, from_yaml
from hwopt.errors import InputError


def entries(source: SourceFile) -> dict[str, tuple[Any, int]]:
    return {entry.key: (entry.value, entry.line) for entry in source.entries}


def test_yaml_entries_have_dotted_keys_values_and_lines() -> None:
    text = "a: 1\nb:\n  c: true\n  d: [x, 2]\ne: {f: null}\n1: x\n"
    expected = {"a": (1, 1), "b.c": (True, 3), "b.d": (["x", 2], 4), "e.f": (None, 5), "1": ("x", 6)}
    assert entries(from_yaml(text, "f", "YAML")) == expected


def test_numbers_of_json_are_numbers_in_yaml() -> None:
    source = from_yaml("a: 2e-5\nb: 1e3\nc: '2e-5'\nd: 5e8\n", "f", "YAML")
    assert [entry.value for entry in source.entries] == [2e-5, 1e3, "2e-5", 5e8]


def test_comments_belong_to_the_key_behind_which_above_which_or_below_which_they_stand() -> None:
    text = (
        "# head\n\n# ====\n# above a\na: 'x # no comment'  # behind a\nb: 2\n# below b\n\n"
        "c:\n  # above d\n  d: |\n    # text\n    more\n  e: 1\n"
    )
    source = from_yaml(text, "f", "YAML")
    found = {entry.key: (entry.above, entry.comment, entry.below) for entry in source.entries}
    assert found == {
        "a": (("above a",), "behind a", ()),
        "b": ((), "", ("below b",)),
        "c.d": (("above d",), "", ()),
        "c.e": ((), "", ()),
    }
    assert source.loose == ("head",)


def test_later_line_replaces_an_earlier_one() -> None:
    source = from_yaml("a: 1\nb: 2\na: 3\n", "f", "YAML")
    assert entries(source) == {"b": (2, 2), "a": (3, 3)}
    assert [(entry.key, entry.value, entry.line) for entry in source.replaced] == [("a", 1, 1)]


def test_merge_keys_and_anchors_are_followed_and_are_no_duplicates() -> None:
    source = from_yaml("base: &base\n  lr: 1\n  seed: 2\nrun:\n  <<: *base\n  lr: 3\n", "f", "YAML")
    found = {key: value for key, (value, _) in entries(source).items()}
    assert found == {"base.lr": 1, "base.seed": 2, "run.seed": 2, "run.lr": 3}
    assert not source.replaced


def test_tags_are_not_executed() -> None:
    source = from_yaml("a: !!python/object/apply:os.system ['echo x']\nb: !env HOME\nc: 2024-01-01\n", "f", "YAML")
    assert {entry.key: entry.value for entry in source.entries} == {"a": ["echo x"], "b": "HOME", "c": "2024-01-01"}


def test_json_with_tabs_has_lines() -> None:
    assert entries(from_json('{\n\t"a": 1e-5,\n\t"b": {"c": [1, "x\\ty"]}\n}', "f")) == {"a": (1e-5, 2), "b.c": ([1, "x\ty"], 3)}


def test_toml_entries_have_lines_and_comments() -> None:
    source = from_toml('a = "x # y" # behind\n[t]\n# above\nb = { c = 1 }\n', "f")
    assert entries(source) == {"a": ("x # y", 1), "t.b.c": (1, 4)}
    assert [(entry.comment, entry.above) for entry in source.entries] == [("behind", ()), ("", ("above",))]


leaves = st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    leaves | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=12,
)


def flat(table: dict[str, Any], above: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    found: dict[tuple[str, ...], Any] = {}
    for key, value in table.items():
        found |= flat(value, (*above, key)) if isinstance(value, dict) and value else {(*above, key): value}
    return found


@given(st.dictionaries(st.text(max_size=6), values, min_size=1, max_size=4))
def test_json_is_read_as_json_reads_it(table: dict[str, Any]) -> None:
    source = from_json(json.dumps(table, indent=1), "f")
    assert {entry.path: entry.value for entry in source.entries} == flat(table)


BOMB = "".join(f"k{n}: &a{n} [{', '.join([f'*a{n - 1}' if n else '1'] * 9)}]\n" for n in range(9))
ODD = {
    BOMB: "f:1: more than 50,000 keys and values",
    "a: &x {b: *x}\n": "nested too deeply",
    "\x00": "is not valid YAML",
    "a: {\n": "f:2: is not valid YAML",
    "a: 1\n? [1, 2]\n: 3\n": "f:2: a key is a sequence",
}


@pytest.mark.parametrize("text", ODD, ids=repr)
def test_odd_yaml_is_refused_with_a_message(text: str) -> None:
    with pytest.raises(InputError, match=ODD[text]):
        from_yaml(text, "f", "YAML")
