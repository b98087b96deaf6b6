"""Several files as one source: a glob or a list, with the place of each row in its own file."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from task_rows import job_of, prepared_of

from hwopt.config.job import Data
from hwopt.data.sources.reading import read_all, refuse_missing
from hwopt.data.sources.rows import ReadOptions, Rows
from hwopt.data.sources.tables import text_columns
from hwopt.errors import DataError


def write(path: Path, *lines: str) -> str:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def read(sources: Any, **options: Any) -> Rows:
    return read_all(sources, None, ReadOptions(**{"strict": False, **options}))


def prepare(folder: Path, train: Any, **data: Any) -> Any:
    return prepared_of(job_of("text-classification", {"train": train, **data}), folder)


def test_glob_reads_its_files_in_sorted_order(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        write(tmp_path / f"{name}.csv", "text,label", f"{name} one,x", f"{name} two,y")
    (tmp_path / "d.csv").mkdir()
    write(tmp_path / ".hidden.csv", "other", "z")
    rows = read(str(tmp_path / "*.csv"))
    assert rows.table["text"].to_pylist() == ["a one", "a two", "b one", "b two", "c one", "c two"]
    assert rows.places.at(3) == f"{tmp_path / 'b.csv'}:3"
    assert rows.places.take([5, 0]).at(0) == f"{tmp_path / 'c.csv'}:3"


def test_glob_with_two_stars_reads_subfolders_and_a_file_may_have_a_name_like_a_glob(tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    write(tmp_path / "deep" / "er" / "a.txt", "inside")
    source = write(tmp_path / "part[1].txt", "outside")
    assert sorted(read(str(tmp_path / "**" / "*.txt")).table["text"].to_pylist()) == ["inside\n", "outside\n"]
    assert read(source).table["text"].to_pylist() == ["outside\n"]


def test_list_keeps_its_order_and_puts_columns_into_that_of_the_first_file(tmp_path: Path) -> None:
    first = write(tmp_path / "z.csv", "text,label", "one,1")
    second = write(tmp_path / "a.jsonl", json.dumps({"label": "2", "text": "two"}))
    assert read([first, second]).table.to_pydict() == {"text": ["one", "two"], "label": ["1", "2"]}


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"text": "b", "lable": 1}, "has no column 'label' of .* and has the column 'lable', which .*Did you mean 'lable'"),
        ({"text": "b", "label": 1, "id": 3}, r"has the column 'id', which .*a\.jsonl lacks"),
    ],
)
def test_other_columns_name_the_file_and_the_difference(tmp_path: Path, second: dict[str, Any], message: str) -> None:
    first = write(tmp_path / "a.jsonl", '{"text": "a", "label": 0}')
    with pytest.raises(DataError, match=rf"b\.jsonl: {message}"):
        read([first, write(tmp_path / "b.jsonl", json.dumps(second))])


def test_types_that_differ_are_joined_as_within_one_json_file(tmp_path: Path) -> None:
    parts = [[1, None], ["a"], [[2]]]
    files = [
        write(tmp_path / f"{number}.jsonl", *(json.dumps({"text": value, "label": "x"}) for value in values))
        for number, values in enumerate(parts)
    ]
    whole = write(tmp_path / "whole.jsonl", *(json.dumps({"text": value, "label": "x"}) for part in parts for value in part))
    several, one = read(files), read(whole)
    assert several.table.to_pydict() == one.table.to_pydict()
    assert several.non_strings == one.non_strings


def test_numbers_widen_and_encoded_strings_are_joined(tmp_path: Path) -> None:
    encoded = pa.table({"text": pa.array(["a", "b"]).dictionary_encode(), "label": [0, 1]})
    pyarrow.parquet.write_table(encoded, tmp_path / "a.parquet")
    pyarrow.parquet.write_table(pa.table({"text": pa.array(["c"], pa.large_string()), "label": [2.0]}), tmp_path / "b.parquet")
    rows = read(str(tmp_path / "*.parquet"))
    assert list(map(list, text_columns(rows, ["text"]))) == [["a", "b", "c"]]
    assert rows.table["label"].to_pylist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("several", [False, True])
def test_class_names_that_differ_are_refused(several: bool, tmp_path: Path) -> None:
    import datasets

    for name, classes in (("a", ["no", "yes"]), ("b", ["yes", "no"])):
        kind = datasets.ClassLabel(names=classes)
        features = datasets.Features({"text": datasets.Value("string"), "label": datasets.List(kind) if several else kind})
        data = {"text": ["x"], "label": [[0]] if several else [0]}
        datasets.Dataset.from_dict(data, features=features).to_parquet(tmp_path / f"{name}.parquet")
    with pytest.raises(DataError, match=r"b\.parquet: the classes of column 'label' are \['yes', 'no'\], those of .*a\.parquet"):
        read(str(tmp_path / "*.parquet"))


def test_bad_rows_are_named_with_their_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # long paths are shortened
    good = [f"text {number},{'xy'[number % 2]}" for number in range(60)]
    write(tmp_path / "a.csv", "text,label", *good, "only text")
    write(tmp_path / "b.csv", "text,label", "  ,x", *good)
    prepared = prepare(tmp_path, "*.csv")
    assert len(prepared.train) == 120
    (warning,) = prepared.warnings
    assert warning.startswith("skipped 2 of 122 rows of *.csv: a.csv:62, b.csv:2 (")
    (entry,) = prepared.bad_rows
    assert [(row["file"], row["line"]) for row in entry["left_out"]] == [("a.csv", 62), ("b.csv", 2)]


def test_limit_of_bad_rows_holds_for_each_file(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", "text,label", *(f"text {number},{'xy'[number % 2]}" for number in range(500)))
    write(tmp_path / "b.csv", "text,label", *(f"text {number},x" for number in range(10)), ",x", ",x")
    with pytest.raises(DataError, match=r"b\.csv: 2 of 12 rows cannot be used, more than 5%: lines 12, 13"):
        prepare(tmp_path, str(tmp_path / "*.csv"))
    with pytest.raises(DataError, match=r"b\.csv:12: has no text.*data\.on_bad_row = 'skip'"):
        prepare(tmp_path, str(tmp_path / "*.csv"), on_bad_row="stop")


def test_documents_without_text_are_bad_rows_with_one_limit_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # long paths are shortened
    for number in range(40):
        (tmp_path / f"{number:02}.txt").write_text(f"document {number}")
    (tmp_path / "03.txt").write_text("")
    (tmp_path / "07.txt").write_bytes(b"caf\xe9\n")
    rows = read("*.txt")
    assert len(rows.usable()) == 38
    assert rows.bad_rows.note().startswith("skipped 2 of 40 rows of *.txt: 03.txt: row 1, ")
    refuse_missing(Data(train="*.txt"))
    (tmp_path / "09.txt").write_text(" \n")
    with pytest.raises(DataError, match=r"\*\.txt: 3 of 40 rows cannot be used, more than 5%"):
        read("*.txt").usable()


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ("none-*.csv", r"none-\*\.csv: no file matches; the folder '\.' has: a\.csv, b\.csv"),
        ("no/such/*.csv", r"no file matches; the folder 'no/such' is empty or does not exist"),
        (["a.csv", "missing.csv"], r"missing\.csv: no such file"),
        (["a.csv", "*.csv"], r"a\.csv: is given twice, as a\.csv, \*\.csv"),
        ([{"path": "a.csv", "weight": 1}, {"path": "?.csv", "weight": 1}], r"a\.csv: is given twice"),
    ],
)
def test_sources_that_do_not_exist_or_repeat_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train: Any, message: str
) -> None:
    for name in ("a", "b"):
        write(tmp_path / f"{name}.csv", "text,label", "x,y")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=message):
        refuse_missing(Data.model_validate({"train": train}))


def test_glob_that_matches_the_evaluation_file_is_refused(tmp_path: Path) -> None:
    for name in ("train-1", "train-2", "test"):
        write(tmp_path / f"{name}.csv", "text,label", "x,y", "z,w")
    with pytest.raises(DataError, match=r"test\.csv: data\.train has this file, and so has the evaluation or the test"):
        refuse_missing(Data(train=str(tmp_path / "*.csv"), test=str(tmp_path / "test.csv")))
    refuse_missing(Data(train=str(tmp_path / "train-*.csv"), test=str(tmp_path / "test.csv")))


def test_max_rows_reads_the_first_rows_of_each_file(tmp_path: Path) -> None:
    lines = [f"text {number},{'xy'[number % 2]}" for number in range(30)]
    write(tmp_path / "a.csv", "text,label", "", "bad line", *lines)
    write(tmp_path / "b.csv", "text,label", *lines, "bad line")
    prepared = prepare(tmp_path, str(tmp_path / "*.csv"), max_rows=25)
    assert len(prepared.train) == 50
    assert prepared.notes[-2:] == [
        f"{tmp_path / name}: the first 25 of 30 rows are read (data.max_rows)" for name in ("a.csv", "b.csv")
    ]
    assert [row["line"] for row in prepared.bad_rows[0]["left_out"]] == [3]
