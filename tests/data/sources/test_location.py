"""What a data source is, and the messages for what hwopt does not read."""

import json
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa
import pyarrow.parquet
import pytest
from task_rows import MESSAGES

from hwopt.config.job import Data
from hwopt.data.sources.conll_reader import CONLL_EXTENSIONS
from hwopt.data.sources.location import EXTENSIONS, configured, locate
from hwopt.data.sources.rows import ReadOptions
from hwopt.data.sources.tables import find_column, read_rows
from hwopt.data.sources.text_file import likely_encoding
from hwopt.errors import DataError
from hwopt.tasks.recognition import read_any

ROWS = [{"text": "one", "label": 1}, {"text": "two", "label": 0}]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a.csv.gz", r"is an archive; unpack it"),
        ("a.xlsx", r"is a spreadsheet; save the sheet as 'CSV UTF-8'"),
        ("a.dat", r"unknown file extension '\.dat'; .* set data\.format, such as data\.format = 'csv'"),
    ],
)
def test_file_of_another_format_names_the_remedy(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(DataError, match=message):
        locate(str(tmp_path / name))


def test_utf8_is_not_misread_in_an_encoding_of_single_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label\nplain,1\nschön,1\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"a\.csv: is UTF-8, but data\.encoding is 'cp1252'\. .*--set data\.encoding=utf-8"):
        read_rows(str(tmp_path / "a.csv"), options=ReadOptions(encoding="cp1252"))


@pytest.mark.parametrize(("text", "encoding"), [("schön", "cp1252"), ("联通", "gbk"), ("Ярослав", "koi8-r")])
def test_file_in_its_own_encoding_is_read(text: str, encoding: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"text,label\n{text},1\n", encoding=encoding)  # the bytes in gbk are valid UTF-8 too
    rows = read_rows(str(tmp_path / "a.csv"), options=ReadOptions(encoding=encoding))
    assert rows.table["text"].to_pylist() == [text]


def test_every_format_of_a_job_has_a_reader() -> None:
    (formats,) = [get_args(part) for part in get_args(Data.model_fields["format"].annotation) if get_args(part)]
    assert {f".{name}" for name in formats} | set(CONLL_EXTENSIONS) == set(EXTENSIONS)


def test_format_opens_a_file_with_an_unknown_extension(tmp_path: Path) -> None:
    (tmp_path / "export.dat").write_text("text;label\na;1\n")
    rows = read_rows(str(tmp_path / "export.dat"), options=ReadOptions(format="csv"))
    assert rows.table.to_pylist() == [{"text": "a", "label": "1"}]


def test_binary_file_with_a_name_of_text_is_recognised(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"PK\x03\x04" + bytes(range(256)))
    with pytest.raises(DataError, match="contains zero bytes: a binary file such as a workbook of Excel"):
        read_rows(str(tmp_path / "a.csv"))


def test_folder_names_the_globs_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    for name in ("a.txt", "b.txt"):
        (tmp_path / "deep" / "er" / name).write_text("x")
    with pytest.raises(DataError, match=r"give its files: '.*deep/\*\*/\*\.txt' \(2 files\)$"):
        locate(str(tmp_path / "deep"))


def test_configuration_follows_the_last_colon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("odd:name.csv").write_text("x")
    assert configured("owner/name:part") == ("owner/name", "part")
    assert configured("owner/name") == ("owner/name", None)
    assert configured("odd:name.csv") == ("odd:name.csv", None)
    assert configured(r"C:\data\train") == (r"C:\data\train", None)


PANDAS = {"text": {"0": "a", "1": "b"}, "label": {"0": 1, "1": 0}}
TABLES = [({"version": "1.0", "rows": ROWS}, 2), ({"version": "1.0", "data": ROWS}, None), (PANDAS, None)]


@pytest.mark.parametrize(("table", "indent"), TABLES)
def test_json_object_with_the_rows_of_a_table_is_refused(table: dict[str, Any], indent: int | None, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(table, indent=indent))
    with pytest.raises(DataError, match=r"a\.json: is one object; hwopt reads a list of objects.*to_json\(orient="):
        read_rows(str(tmp_path / "a.json"))


@pytest.mark.parametrize("row", [ROWS[0], {"messages": MESSAGES}, {"id": [1, 2], "meta": {"a": 1}}])
def test_json_file_of_one_row_is_read(tmp_path: Path, row: dict[str, Any]) -> None:
    (tmp_path / "a.json").write_text(json.dumps(row))
    assert read_rows(str(tmp_path / "a.json")).table.to_pylist() == [row]


def test_damaged_first_line_of_jsonl_is_a_bad_row(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(['{"text": ', *map(json.dumps, ROWS)]))
    rows = read_rows(str(tmp_path / "a.jsonl"), options=ReadOptions(strict=False))
    assert rows.table.to_pylist() == ROWS
    assert list(rows.bad_rows.reasons) == [1]


def test_fields_of_nested_columns_are_columns(tmp_path: Path) -> None:
    rows = [{"review": {"title": {"main": "t"}, "body": f"text {number}"}, "label": number % 2} for number in range(4)]
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    table = read_rows(str(tmp_path / "a.parquet")).table
    assert find_column(table, "review.body", "a").to_pylist() == [f"text {number}" for number in range(4)]
    assert find_column(table, "review.title.main", "a").to_pylist() == ["t"] * 4
    with pytest.raises(DataError, match=r"no column 'review\.bdy'\. Did you mean 'review\.body'\? It has: .*review\.title\.main"):
        find_column(table, "review.bdy", "a")
    names = read_any(str(tmp_path / "a.parquet"))[0].table.column_names  # pyarrow 21 orders the fields
    assert sorted(names) == ["label", "review.body", "review.title.main"]


def test_column_with_a_dot_in_its_name_comes_first() -> None:
    table = pa.table({"a.b": ["own"], "a": [{"b": "field"}]})
    assert find_column(table, "a.b", "a").to_pylist() == ["own"]


@pytest.mark.parametrize(
    ("text", "encoding", "likely"),
    [
        ("Der Käse ist schön, die Größe übel.\n" * 20, "latin-1", "cp1252"),
        ("El niño comió “piñas” ¿cuánto? 5 €\n" * 10, "cp1252", "cp1252"),
        ("It’s a “great” movie.\n" * 10, "cp1252", "cp1252"),
        ("Größe M – „toll“, 5 €\n" * 10, "cp1252", "cp1252"),
        ("Zażółć gęślą jaźń\n", "cp1250", "cp1250"),
        ("Отличный товар, всем советую. Доставка быстрая.\n", "koi8-r", "koi8-r"),
        ("the best déjà vu à la carte\n", "cp1252", "cp1252"),
        ("the best ä\n", "cp1252", "cp1252"),
        ("とても良い商品です。また買います。\n", "shift_jis", "cp932"),
        ("schön\n", "utf-8", None),
        ("schön\n", "utf-16", None),
    ],
)
def test_likely_encoding(tmp_path: Path, text: str, encoding: str, likely: str | None) -> None:
    (tmp_path / "a.csv").write_text(text, encoding=encoding)
    assert likely_encoding(tmp_path / "a.csv") == likely


def test_file_with_one_bad_line_is_utf8(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes("schön\n".encode() * 2 + "schön\n".encode("cp1252"))
    assert likely_encoding(tmp_path / "a.csv") is None
