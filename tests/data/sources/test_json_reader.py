import pytest

from hwopt.data.sources.json_reader import to_table


@pytest.mark.parametrize("pack", [1, 2, 3])
def test_table_does_not_depend_on_how_many_rows_are_packed_at_once(pack: int, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {
        "text": ["a", None, "c", "d", "e"],
        "late": [None, None, None, "d", None],
        "number": [1, 2, None, 4, 5],
        "float": [1, 2, 0.5, 4, 5],
        "flag": [True, False, True, False, None],
        "flag beside numbers": [1, 1, 1, True, 0.5],
        "mixed": ["01", 1, "c", 2.0, None],
        "objects": [{"a": 1}, {"b": 2}, None, {"a": 1, "b": 2}, {}],
        "huge": [1, 2**70, 3, 4, 5],
        "surrogate": ["a", "\ud800", "b", "c", "d"],
        "nothing": [None] * 5,
    }
    rows = [{name: column[row] for name, column in values.items() if column[row] is not None} for row in range(5)]
    expected, non_strings = to_table(rows)
    monkeypatch.setattr("hwopt.data.sources.json_reader.PACK", pack)
    monkeypatch.setattr("hwopt.data.sources.spill.LEAST_BYTES", 0)
    found = to_table(rows)
    assert (found[0].schema, found[0].to_pylist()) == (expected.schema, expected.to_pylist())
    assert found[1] == non_strings
