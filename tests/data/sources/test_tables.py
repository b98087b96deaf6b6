"""Rows of files, of `datasets` folders, and of clones: folders with the content of a data set of the hub."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from hwopt.config.job import Data
from hwopt.data.bad_rows import BadRows, Places
from hwopt.data.sources.reading import read_all, refuse_missing
from hwopt.data.sources.rows import ReadOptions, Rows
from hwopt.data.sources.tables import read_rows, text_columns
from hwopt.errors import DataError


def read_table(source, split=None):
    return read_rows(source, split).table


def write(path: Path, content: str | bytes) -> str:
    path.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
    return str(path)


def test_csv_with_a_bom_quotes_and_windows_lines(tmp_path: Path) -> None:
    source = write(tmp_path / "a.csv", b'\xef\xbb\xbftext,label\r\n"two, ""quoted""\r\nlines",01\r\nNA,true\r\n')
    table = read_table(source)
    assert table.to_pydict() == {"text": ['two, "quoted"\r\nlines', "NA"], "label": ["01", "true"]}  # no types are guessed


def test_first_line_of_excel_names_the_delimiter(tmp_path: Path) -> None:
    rows = read_rows(write(tmp_path / "a.csv", "sep=;\r\ntext;label\r\na, b;1\r\n"))
    assert rows.table.to_pydict() == {"text": ["a, b"], "label": ["1"]}
    assert rows.places.at(0) == f"{tmp_path / 'a.csv'}:3"


def test_blanks_behind_separators_are_no_part_of_a_cell_if_the_header_has_them(tmp_path: Path) -> None:
    table = read_table(write(tmp_path / "a.csv", 'text, label\na,  good\n"b, c", "bad, \nnot good"\n'))
    assert table.to_pydict() == {"text": ["a", "b, c"], "label": ["good", "bad, \nnot good"]}
    assert read_table(write(tmp_path / "b.csv", "text,label\na, good\n"))["label"].to_pylist() == [" good"]


def test_tsv_keeps_quotes_as_text(tmp_path: Path) -> None:
    source = write(tmp_path / "a.tsv", "sentence\tlabel\n\"half a quote\t1\nit's, so\t0\n")
    assert read_table(source)["sentence"].to_pylist() == ['"half a quote', "it's, so"]


def test_jsonl_values_are_kept_without_conversion(tmp_path: Path) -> None:
    lines = [
        '\ufeff{"text": "2020-01-01", "label": 1}',
        "",
        '{"text": "b", "label": 2, "more": [1]}',
        '{"label": 3, "more": "x"}',
    ]
    table = read_table(write(tmp_path / "a.jsonl", "\n".join(lines)))
    assert table.to_pydict() == {"text": ["2020-01-01", "b", None], "label": [1, 2, 3], "more": [None, "[1]", "x"]}


def test_txt_file_is_one_row(tmp_path: Path) -> None:
    assert read_table(write(tmp_path / "a.txt", "one\r\n\r\ntwo\n")).to_pydict() == {"text": ["one\r\n\r\ntwo\n"]}


def test_datasets_folder_is_read_by_split(tmp_path: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_dict({"text": ["a", "b", "c"], "label": [1, 0, 1]})
    rows.select([2, 0]).save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": rows, "test": rows.select([1])}).save_to_disk(str(tmp_path / "many"))
    assert read_table(str(tmp_path / "one"))["text"].to_pylist() == ["c", "a"]
    assert read_table(str(tmp_path / "many")).num_rows == 3
    assert read_table(str(tmp_path / "many"), "test")["text"].to_pylist() == ["b"]
    with pytest.raises(DataError, match=r"no split 'tset'\. Did you mean 'test'\? It has: train, test"):
        read_table(str(tmp_path / "many"), "tset")
    with pytest.raises(DataError, match=r"has no splits; omit data\.split = 'test'"):
        read_table(str(tmp_path / "one"), "test")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "", r"a\.csv: is empty"),
        ("a.csv", "text,label\n", r"a\.csv: has no rows"),
        ("a.csv", "text,label\nx,1\na,b,1\n", r"a\.csv:3: has 3 columns, the header has 2: 'a,b,1'"),
        ("a.tsv", "text\tlabel\nx\n", r"a\.tsv:2: has 1 column, the header has 2: 'x'; separate cells by tabs"),
        ("a.csv", b"text,label\nok,1\ncaf\xe9,1\n", r"a\.csv:3: is not UTF-8 \(byte 0xe9\)"),
        ("a.csv", "text,label\nx,1\n".encode("utf-16-le"), r"a\.csv: contains zero bytes: a binary file"),
        ("a.csv", "text,label\nx,1\n".encode("utf-16") + b"x", r"a\.csv: is not valid utf-16"),
        ("a.csv", b"t\xe9xt,label\nx,1\n", r"a\.csv:1: the header is not UTF-8 \(byte 0xe9\)"),
        ("a.csv", 'text,label\n"x,1\ny,0\n', r"a\.csv:2: has an unclosed quote, or a quote inside a cell: '\"x,1'"),
        ("a.csv", '"text,label\n', r"a\.csv:1: the header has an unclosed quote"),
        ("a.txt", b"fine\nhalf \xe2\x82", r"a\.txt: row 1: is not UTF-8 \(byte 0xe2\): line 2"),
        ("a.txt", " \n", r"a\.txt: row 1: has no text"),
        ("a.jsonl", '{"text": "x"}\n{"text": \n', r"a\.jsonl:2: is not valid JSON"),
        ("a.jsonl", '{"text": "x"}\n3\n', r"a\.jsonl:2: is not an object with the columns as keys: 3"),
        ("a.jsonl", '{"text": ' + "[" * 100_000 + "\n", r"a\.jsonl:1: is not valid JSON: nested too deeply"),
        ("a.json", '[{"text": "x"},\n{"text"}]', r"a\.json:2: is not valid JSON"),
        ("a.json", "[[1]]", r"a\.json: row 1: is not an object with the columns as keys: \[1\]"),
        ("a.parquet", "PAR1", r"a\.parquet: is not a valid parquet file"),
    ],
)
def test_broken_file_is_refused_with_its_line(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        read_table(write(tmp_path / name, content))
    assert "\n" not in str(caught.value)


def test_utf_16_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    """Excel's "Unicode text" is UTF-16 with a byte order mark."""
    for name in ("utf-16", "utf-16-be"):
        mark = "\ufeff" if name == "utf-16-be" else ""
        source = write(tmp_path / "a.tsv", f"{mark}text\tlabel\r\ncafé €\t1\r\n".encode(name))
        assert read_table(source).to_pydict() == {"text": ["café €"], "label": ["1"]}


@pytest.mark.parametrize("end", ["\r\n", "\r"])
def test_line_ends_do_not_change_the_rows(end: str, tmp_path: Path) -> None:
    pairs = [("caf\u00e9", "1"), ("b\u2028c", "0"), ("d", "1")]
    objects = [json.dumps({"text": text, "label": label}, ensure_ascii=False) for text, label in pairs]
    contents = {
        "a.csv": ["text,label", *map(",".join, pairs), ""],
        "a.tsv": ["text\tlabel", *map("\t".join, pairs), ""],
        "a.jsonl": objects,
        "a.json": ["[", *(line + "," for line in objects[:-1]), objects[-1], "]"],
    }
    for name, lines in contents.items():
        assert list(zip(*read_table(write(tmp_path / name, end.join(lines))).to_pydict().values(), strict=True)) == pairs, name


def test_gated_data_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def load_dataset(*_: object, **__: object) -> None:
        raise RuntimeError("Dataset 'imdb' is a gated dataset")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DataError, match="imdb: is gated.*`hf auth login`"):
        read_table("imdb")


def rows_of(table: pa.Table, strict: bool = True) -> Rows:
    return Rows(table, Places("t.csv", "row", range(1, table.num_rows + 1)), BadRows("t.csv", "row", strict))


def test_missing_or_wrong_column_is_refused() -> None:
    rows = rows_of(pa.table({"premise": ["a", None], "number": [1, 2], "text": ["x", "y"]}))
    assert list(map(list, text_columns(rows, ["text"]))) == [["x", "y"]]
    with pytest.raises(
        DataError, match=r"t\.csv: has no column 'premises'\. Did you mean 'premise'\? It has: premise, number, text"
    ):
        text_columns(rows, ["premises"])
    with pytest.raises(DataError, match=r"t\.csv: row 2: 'premise' has no value"):
        text_columns(rows, ["premise"])
    with pytest.raises(DataError, match=r"t\.csv: column 'number' holds int64, not text"):
        text_columns(rows, ["number"])


HEADER = """---
configs:
- config_name: first
  data_files:
  - split: train
    path: first/*.jsonl
  - split: test
    path: test.jsonl
- config_name: second
  data_files: second.jsonl
---
# A data set
"""


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    folder = tmp_path / "clone"
    (folder / "first").mkdir(parents=True)
    (folder / "README.md").write_text(HEADER)
    for name in ("first/0", "first/1", "test", "second"):
        rows = [{"text": f"{name} {number}", "label": number % 2} for number in range(5)]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    yield folder
    datasets.enable_progress_bars()


def texts(source: Any, split: str | None = None, **options: Any) -> list[str]:
    return list(read_all(source, split, ReadOptions(**options)).table["text"].to_pylist())


def test_configuration_and_split_are_read(clone: Path) -> None:
    assert texts(f"{clone}:first") == [f"first/{file} {number}" for file in (0, 1) for number in range(5)]
    assert texts(f"{clone}:first", "test") == [f"test {number}" for number in range(5)]
    assert texts(f"{clone}:second") == [f"second {number}" for number in range(5)]


def test_file_that_changed_is_read_again(clone: Path) -> None:
    assert len(texts(f"{clone}:second")) == 5
    (clone / "second.jsonl").write_text('{"text": "new", "label": 1}\n')
    assert texts(f"{clone}:second") == ["new"]


@pytest.mark.parametrize(
    ("configuration", "split", "message"),
    [
        ("", None, r"clone: .*Config name is missing.*\['first', 'second'\].*NAME:CONFIGURATION"),
        (":frist", None, r"clone:frist: .*'frist' not found.*\['first', 'second'\]"),
        (":first", "tset", r"clone:first: .*split.*tset.*\['train', 'test'\].*data\.split"),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_wrong_configuration_or_split_lists_the_known_ones(
    clone: Path, configuration: str, split: str | None, message: str, streaming: bool
) -> None:
    with pytest.raises(DataError, match=message):
        texts(f"{clone}{configuration}", split, streaming=streaming, max_rows=3)


def test_streaming_reads_the_first_rows_and_does_not_open_the_other_files(clone: Path) -> None:
    (clone / "first" / "1.jsonl").write_text("this is not JSON\n")
    assert texts(f"{clone}:first", streaming=True, max_rows=4) == [f"first/0 {number}" for number in range(4)]
    with pytest.raises(DataError, match=r"clone:first: `datasets` cannot read it "):
        texts(f"{clone}:first", max_rows=4)


def test_streamed_rows_equal_the_first_of_all_rows(clone: Path) -> None:
    whole, streamed = (
        read_all(f"{clone}:first", None, ReadOptions(max_rows=7, streaming=streaming)).table for streaming in (False, True)
    )
    assert streamed.to_pydict() == whole.to_pydict()
    assert streamed.schema.types == whole.schema.types


def test_streaming_of_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label\nx,y\n")
    with pytest.raises(DataError, match=r"data\.streaming: applies to data sets of the hub"):
        refuse_missing(Data(train=str(tmp_path / "a.csv"), streaming=True, max_rows=3))


def test_data_sets_and_files_are_joined(clone: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text('{"text": "own", "label": 1}\n')
    rows = read_all([f"{clone}:second", str(file)], None, ReadOptions())
    assert rows.table["text"].to_pylist() == [*(f"second {number}" for number in range(5)), "own"]
    assert (rows.places.at(4), rows.places.at(5)) == (f"{clone}:second: row 5", f"{file}:1")


def test_hub_clients_work_offline_if_the_hub_is_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise they ask six times for a name that is not on this machine, with a message each time."""
    import datasets
    from huggingface_hub import constants

    def load_dataset(*arguments: Any, **options: Any) -> None:
        assert {constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE} == {True}
        raise ConnectionError("no network")

    monkeypatch.setattr("hwopt.data.sources.tables.hub_is_out_of_reach", lambda: True)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(DataError, match="photoss: no such file or folder, and no such hub data set .*no network"):
        texts("photoss")
    assert not constants.HF_HUB_OFFLINE  # the network may come back


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "a good film,good\na bad film,bad\nanother,good\n",
            ":1: is read as the names of the columns: a good film, good",
        ),
        ("a film,0.5\na book,1.5\n", "a film, 0.5. If it is a sample, add a line of names above"),
        ("text,label\na good film,good\n", ""),
        (",0,1\n0,a good film,1\n1,a bad film,0\n", ""),  # as pandas writes a table without names
    ],
)
def test_a_first_line_that_looks_like_a_sample_is_named(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "file.csv").write_text(text)
    source = str(tmp_path / "file.csv")
    for rows in (read_rows(source), read_all([source, write(tmp_path / "b.csv", text)], None, ReadOptions())):
        assert said in (warnings := " ".join(rows.warnings))
        assert bool(warnings) == bool(said)


def test_a_header_in_the_middle_is_no_sample(tmp_path: Path) -> None:
    (tmp_path / "file.csv").write_text("text,label\na,x\ntext,label\nb,y\n")
    rows = read_rows(str(tmp_path / "file.csv"), options=ReadOptions(strict=False))
    assert (rows.table["label"].to_pylist(), rows.bad_rows.reasons) == (["x", "y"], {3: "repeats the header"})


@pytest.mark.parametrize("cell", ["", " \t", "\u200b\u200d\ufeff", "\u00ad\n", "\x00\x1b"])
def test_a_cell_with_nothing_to_see_has_no_text(tmp_path: Path, cell: str) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"text": "👩\u200d🔬"}}\n{json.dumps({"text": cell})}\n', encoding="utf-8")
    rows = read_rows(str(tmp_path / "a.jsonl"), options=ReadOptions(strict=False))
    text_columns(rows, ["text"])
    assert rows.bad_rows.reasons == {2: "has no text"}


def test_texts_of_a_view_column_are_taken_in_any_order() -> None:
    table = pa.table({"text": pa.array(["a", "b", "c"], pa.string_view())})
    rows = Rows(table, Places("a.parquet", "row", range(1, 4)), BadRows("a.parquet", "row", True))
    (texts,) = text_columns(rows, ["text"])
    assert list(texts.take([2, 0])) == ["c", "a"]
