"""What the columns of a file are recognised as."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest
from pinned_torch import IS_PINNED
from task_rows import MESSAGES, write_jsonl

from hwopt.data.sources.columns import has_many_classes, label_columns
from hwopt.data.sources.conll_reader import looks_like_conll
from hwopt.errors import DataError
from hwopt.tasks.recognition import reading_notes, recognise

OTHER = "de" if IS_PINNED else "fr"  # the order of the file; Arrow 21 sorts the fields of an object
TEXT_AND_LABEL = {"text": ["text"], "label": "label"}


def rows_of(**columns: str | list[Any]) -> list[dict[str, Any]]:
    """Twenty rows; {n} in a text becomes the row's number, {class} one of two classes. The values of a list take turns."""

    def cell(given: str | list[Any], n: int) -> Any:
        return given.format(n=n, **{"class": "ab"[n % 2]}) if isinstance(given, str) else given[n % len(given)]

    return [{name: cell(given, n) for name, given in columns.items()} for n in range(20)]


SHAREGPT = [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]
FRACTIONS = [n / 7 for n in range(20)]
TRANSLATIONS = [{"en": f"one {n}", OTHER: f"eins {n}"} for n in range(20)]
ANSWERS = [{"text": [f"n {n}"], "start": [5]} for n in range(20)]
COLUMNS: list[tuple[str, list[dict[str, Any]], dict[str, Any]]] = [
    ("text-classification", rows_of(text="text {n}", label="{class}"), TEXT_AND_LABEL),
    ("text-classification", rows_of(id="{n}", Review="a {n}", Sentiment="{class}"), {"text": ["Review"], "label": "Sentiment"}),
    (
        "text-classification",
        rows_of(premise="it is {n}", hypothesis="is it {n}?", label="{class}"),
        TEXT_AND_LABEL | {"text": ["premise", "hypothesis"]},
    ),
    (
        "text-classification",
        rows_of(short="{n} x", betreff="a longer sentence {n}", ablage="{class}"),
        {"text": ["betreff"], "label": "ablage"},
    ),
    ("text-classification", rows_of(text="t {n}", label=[0.0, 1.0]), TEXT_AND_LABEL),
    ("causal-lm", rows_of(text=["a b", None], label=[None]), {"text": ["text"]}),
    ("causal-lm", rows_of(question="what {n}?", answer="it is {n}"), {"prompt": "question", "completion": "answer"}),
    ("causal-lm", rows_of(messages=[MESSAGES], source="{class}"), {"messages": "messages"}),
    ("causal-lm", [{"conversations": SHAREGPT}], {"messages": "conversations"}),
    ("causal-lm", rows_of(instruction="say {n}", input="", output="it is {n}"), {}),
    ("causal-lm", rows_of(instruction="say {n}", input="x", output="it is {n}", text="both {n}"), {"messages": "instruction"}),
    ("regression", rows_of(text="some text {n}", score="0.{n}"), TEXT_AND_LABEL | {"label": "score"}),
    ("regression", rows_of(text="some text {n}", label="0.{n}"), TEXT_AND_LABEL),
    (
        "regression",
        rows_of(genre="{class}", sentence1="some text {n}", sentence2="text {n}", score="0.{n}"),
        {"text": ["sentence1", "sentence2"], "label": "score"},
    ),
    ("text-classification", rows_of(text="t {n}", label=["3.9", "3.11", "3.12"]), TEXT_AND_LABEL),
    ("regression", rows_of(text="t {n}", label=[3.9, 3.11, 3.12]), TEXT_AND_LABEL),
    (
        "text-classification",
        rows_of(text="t {n}", zip="01", user_id=[0, 1], stars=[*range(4)]),
        TEXT_AND_LABEL | {"label": "stars"},
    ),
    ("text-classification", rows_of(text="t {n}", year=[2023, 2024], queue=["a", "b", "c"]), TEXT_AND_LABEL | {"label": "queue"}),
    (
        "text-classification",
        rows_of(question="is it {n}?", passage="it is {n}", answer=[True, False]),
        {"text": ["question", "passage"], "label": "answer"},
    ),
    (
        "text-classification",
        rows_of(product=["b0", "b1", "b2", "b3", "b4"], Stars=[0, 1, 2], Text="a longer text {n}"),
        {"text": ["Text"], "label": "Stars"},
    ),
    (
        "seq2seq-lm",
        rows_of(id="a{n}", translation=TRANSLATIONS),
        {"prompt": "translation.en", "completion": f"translation.{OTHER}"},
    ),
    ("causal-lm", rows_of(context="it is {n}", answers=ANSWERS), {"text": ["context"]}),
    ("causal-lm", rows_of(text="t {n}", labels=[[0.1, value] for value in FRACTIONS]), {"text": ["text"]}),
    ("causal-lm", rows_of(messages=[MESSAGES], category="{class}", score=FRACTIONS), {"messages": "messages"}),
    ("causal-lm", rows_of(text="some text {n}", genres=["[{'id': 1}]"]), {"text": ["text"]}),
    ("text-classification", rows_of(messages="a text {n}", label="{class}"), TEXT_AND_LABEL | {"text": ["messages"]}),
    (
        "causal-lm",
        rows_of(instruction="say {n}", context="", response="it is {n}", category="{class}"),
        {"prompt": "instruction", "completion": "response"},
    ),
    (
        "text-classification",
        rows_of(question="what {n}?", answer="it is {n}", label="{class}"),
        TEXT_AND_LABEL | {"text": ["question", "answer"]},
    ),
    (
        "text-classification",
        rows_of(text="t {n}", prompt_id=[0, 1], genre=[*"aabb"], label_confidence=[0, 1], score=FRACTIONS, gold_label=[*"abc"]),
        TEXT_AND_LABEL | {"label": "gold_label"},
    ),
    ("text-classification", rows_of(text="t {n}", is_new=[0, 1], has_image=[0, 0, 1, 1], label=[*"aaaabbbb"]), TEXT_AND_LABEL),
    ("text-classification", rows_of(text="t {n}", span="[1, 2]", label="{class}"), TEXT_AND_LABEL),
    ("text-classification", rows_of(text="t {n}", label=[math.nan, *(n % 3 for n in range(1, 20))]), TEXT_AND_LABEL),
    (
        "regression",
        [*rows_of(text="some text {n}", score="0.{n}"), {"text": "t", "score": "NaN"}, {"text": "t", "score": "NA"}],
        TEXT_AND_LABEL | {"label": "score"},
    ),
    (
        "multi-label-classification",
        rows_of(text="a text {n}", labels="['a', '{class}']"),
        TEXT_AND_LABEL | {"label": "labels"},
    ),
    ("multi-label-classification", rows_of(text="t {n}", labels=[["a", "b"], "a"]), TEXT_AND_LABEL | {"label": "labels"}),
    ("multi-label-classification", rows_of(text="t {n}", labels=[["b"], ["a", "c"], []]), TEXT_AND_LABEL | {"label": "labels"}),
    (
        "multi-label-classification",
        rows_of(text="t {n}", labels=["a; b", "b", "c", "a;c"]),
        TEXT_AND_LABEL | {"label": "labels", "label_delimiter": ";"},
    ),
    (
        "multi-label-classification",
        rows_of(text="t", toxic=[0, 1], insult=[True, False, False]),
        TEXT_AND_LABEL | {"label": ["toxic", "insult"]},
    ),
    ("multi-label-classification", rows_of(text="a text {n}", terms="['cs.CV', '{class}']"), TEXT_AND_LABEL | {"label": "terms"}),
]


@pytest.mark.parametrize(("kind", "rows", "keys"), COLUMNS)
def test_columns_are_recognised(kind: str, rows: list[dict[str, Any]], keys: dict[str, Any], tmp_path: Path) -> None:
    found = recognise(write_jsonl(tmp_path / "rows.jsonl", rows))
    assert (found.kind, found.keys, found.rows) == (kind, keys, len(rows))
    assert found.chat == (kind == "causal-lm" and ("messages" in keys or not keys))


def test_csv_with_unnamed_columns_is_recognised(tmp_path: Path) -> None:
    (tmp_path / "spam.csv").write_text("v1,v2,,,\n" + "".join(f"{('ham', 'spam')[n % 2]},some text {n},,,\n" for n in range(20)))
    found = recognise(str(tmp_path / "spam.csv"))
    assert (found.keys["text"], found.keys["label"]) == (["v2"], "v1")
    assert "column 'v1' has 2 values: ham, spam" in found.why


def test_doubts_about_the_label_are_told(tmp_path: Path) -> None:
    rows = [{"queue": "ab"[n % 2], "priority": "hl"[n % 2], "body": f"a longer text {n}"} for n in range(20)]
    assert "'priority' may also be the label" in recognise(write_jsonl(tmp_path / "rows.jsonl", rows)).why
    (tmp_path / "bare.csv").write_text("".join(f"{('good', 'bad')[n % 2]},some text {n}\n" for n in range(21)))
    assert "bare.csv:1: is read as the names of the columns: good, some text 0" in recognise(str(tmp_path / "bare.csv")).why
    rows = [{"text": f"a text {n}", "label": ["3.9", "3.11"][n % 2]} for n in range(20)]
    why = recognise(write_jsonl(tmp_path / "versions.jsonl", rows)).why
    assert "2 values: 3.11, 3.9; to predict them as numbers set task.kind = 'regression'" in why
    rows = [{"text": f"a text {n}", "stars": ["good", "bad"][n % 2]} for n in range(20)]
    assert "regression" not in recognise(write_jsonl(tmp_path / "words.jsonl", rows)).why
    rows = [{"text": f"a text {n}", "label": n % 11} for n in range(44)]
    assert "11 values: 0, 1, 2, 3, 4, … (11 in all)" in recognise(write_jsonl(tmp_path / "many.jsonl", rows)).why


def test_empty_cells_are_not_a_class_and_columns_that_are_not_read_are_told(tmp_path: Path) -> None:
    rows = [{"title": "two words", "text": f"a longer text {n}", "label": ["a", "b", ""][n % 3]} for n in range(20)]
    why = recognise(write_jsonl(tmp_path / "rows.jsonl", rows)).why
    assert why == "column 'label' has 2 values: a, b; 'title' not read: name in data.text all that the model needs"
    rows = [{"text": f"some text {n}", "date": f"2024-01-{n + 1:02}"} for n in range(20)]
    assert "; 'date' beside 'text' is not read: put" in recognise(write_jsonl(tmp_path / "dates.jsonl", rows)).why


def test_given_task_overrides_the_recognised_one(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", rows_of(text="a text {n}", label="{class}"))
    assert recognise(source, "causal-lm").keys == {"text": ["text"]}


def test_table_without_the_columns_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no column holds text. It has: x, label"):
        recognise(write_jsonl(tmp_path / "numbers.jsonl", [{"x": n, "label": n % 2} for n in range(8)]))
    with pytest.raises(DataError, match="no column looks like a label"):
        recognise(write_jsonl(tmp_path / "texts.jsonl", rows_of(text="some text {n}")), "text-classification")


@pytest.mark.parametrize("cell", ["Käse {n}", "{n}"], ids=["every row", "header"])
def test_encoding_and_delimiter_of_a_german_excel_file_are_recognised(cell: str, tmp_path: Path) -> None:
    lines = [f"{'x schön' if n % 3 else 'grün'} {cell.format(n=n)};{'ab'[n % 2]}" for n in range(60)]
    (tmp_path / "export.csv").write_text("\n".join(["Größe;Klasse", *lines]), encoding="cp1252")
    found = recognise(str(tmp_path / "export.csv"))
    assert found.keys == {"text": ["Größe"], "label": "Klasse", "encoding": "cp1252"}
    assert found.why.startswith("cp1252, such as 'Größe', cells separated by semicolons; ")
    (tmp_path / "quote.csv").write_text("text,label\n" + "It’s good,a\nIt is not,b\n" * 20, encoding="cp1252")
    assert recognise(str(tmp_path / "quote.csv")).why.startswith("cp1252, such as 'It’s', cells separated by commas; ")
    assert not found.ascii


@pytest.mark.parametrize("path", [None, "a.png"])
def test_images_in_a_parquet_file_are_recognised(path: str | None, tmp_path: Path) -> None:
    rows = [{"image": {"bytes": b"x", "path": path}, "raw": b"x", "label": n % 2} for n in range(20)]
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    found = recognise(str(tmp_path / "a.parquet"))
    assert (found.kind, found.keys) == ("image-classification", {"image": "image", "label": "label"})
    pyarrow.parquet.write_table(pa.table({"image": [b"x"] * 20, "label": ["a", "b"] * 10}), tmp_path / "b.parquet")
    assert recognise(str(tmp_path / "b.parquet")).keys == {"image": "image", "label": "label"}


def test_words_with_tags_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    rows = "tokens,tags\n" + "\"['a', 'b']\",\"['O', 'B-X']\"\n" * 20
    (tmp_path / "a.csv").write_text(rows)
    with pytest.raises(DataError, match=r"column 'tokens' holds lists as texts, .*Save the rows so, as jsonl"):
        recognise(str(tmp_path / "a.csv"))
    with pytest.raises(DataError, match=r"or lists with other values than strings; token-classification reads lists of strings"):
        recognise(write_jsonl(tmp_path / "a.jsonl", [{"tokens": ["born", 1990 + n], "tags": ["O", "B-X"]} for n in range(20)]))
    (tmp_path / "b.csv").write_text("word,tag\n" + "".join(f"one{n},O\ntwo{n},B-X\n" for n in range(20)))
    assert "for tags of words set task.kind = 'token-classification'" in recognise(str(tmp_path / "b.csv")).why


def test_quoted_tsv_is_read_as_csv(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("text\tlabel\n" + '"the ""one"""\ta\nother\tb\n' * 9)
    assert recognise(str(tmp_path / "a.tsv")).keys == TEXT_AND_LABEL | {"format": "csv"}
    (tmp_path / "b.tsv").write_text("text\tlabel\n" + '"one" of\ta\nother\tb\n' * 9)
    assert recognise(str(tmp_path / "b.tsv")).keys == TEXT_AND_LABEL


def test_numbers_that_are_not_read_are_told(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", [{"text": f"a text {n}", "share": f"{n}.5 %"} for n in range(20)])
    told = "column 'share' holds numbers in a format that is not read, such as '0.5 %'"
    assert told in recognise(source).why
    with pytest.raises(DataError, match=re.escape(told)):
        recognise(source, "regression")


def test_columns_of_one_name_are_not_proposed(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label,label,,\n" + "some text,a,b,,\nother text,b,a,,\n" * 20)
    found = recognise(str(tmp_path / "a.csv"))
    assert found.keys == {"text": ["text"]}
    assert found.why.endswith("; several columns named 'label' are not read: rename all but one")


@pytest.mark.parametrize(
    ("name", "expected"),
    [("a.csv", "UTF-8, cells separated by tabs"), ("a.tsv", "UTF-8"), ("[ab].csv", "UTF-8, cells separated by commas, tabs")],
)
def test_reading_of_tables_is_told(name: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "b.csv").write_text("text,label\n")
    (tmp_path / name.replace("[ab]", "a")).write_text("text\tlabel\n")
    assert ", ".join(reading_notes(str(tmp_path / name), {})) == expected


@pytest.mark.parametrize("name", ["ner.txt", "ner.tsv", "ner"])
def test_conll_file_of_any_extension_and_encoding_is_recognised(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("Müller NNP B-PER\nschläft VBZ O\n\nKöln NNP B-LOC\n\n" * 20, encoding="cp1252")
    found = recognise(str(tmp_path / name))
    assert (found.kind, found.rows) == ("token-classification", 40)
    assert found.keys == {"text": ["tokens"], "label": "tags", "format": "conll", "encoding": "cp1252"}
    assert found.why.startswith("conll by its content, cp1252, such as 'Müller'; ")


@pytest.mark.parametrize(
    "text",
    ["A sentence.\nAnother one O\n", "text\tlabel\na\tO\nb\tO\n", "a b\nc d\n", "O\nO\n", "a O\nb c O\n", "a B-X\nb I-X\n"],
    ids=["prose", "header", "two words", "one column", "widths", "no O"],
)
def test_other_text_is_not_taken_for_conll(text: str) -> None:
    assert not looks_like_conll(iter(text.splitlines(keepends=True)))


@pytest.mark.parametrize(
    ("name", "text", "format"),
    [
        ("a.txt", "text\tlabel\n" + 'some "text\tx\nmore\ty\n' * 9, "csv"),
        ("a.txt", "text\tlabel\n" + "some text\tx\nmore\ty\n" * 9, "tsv"),
        ("a.dat", "text;label\n" + "some text;x\nmore;y\n" * 9, "csv"),
    ],
)
def test_table_with_the_extension_of_a_text_is_recognised(name: str, text: str, format: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text.replace('"text', '"te""xt"'))
    found = recognise(str(tmp_path / name))
    assert (found.rows, found.keys) == (18, {"text": ["text"], "label": "label", "format": format})


@pytest.mark.parametrize("text", ["One, two.\n" * 20, "a,b\n" * 5, "A\ttab.\nNone.\n" * 9], ids=["prose", "few lines", "widths"])
def test_other_text_is_not_taken_for_a_table(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(text)
    assert "format" not in recognise(str(tmp_path / "a.txt")).keys


def test_files_beside_the_training_data_are_found(tmp_path: Path) -> None:
    for name in ("train", "dev", "test"):
        write_jsonl(tmp_path / f"my-{name}.jsonl", rows_of(text="text {n}", label="{class}"))
    found = recognise(str(tmp_path / "my-train.jsonl"))
    assert found.held_out == {"eval": str(tmp_path / "my-dev.jsonl"), "test": str(tmp_path / "my-test.jsonl")}
    assert recognise(str(tmp_path / "my-dev.jsonl")).held_out == {}
    parts = datasets.DatasetDict(dict.fromkeys(("train", "validation"), datasets.Dataset.from_list(rows_of(text="text {n}"))))
    parts.save_to_disk(str(tmp_path / "saved"))
    assert recognise(str(tmp_path / "saved")).held_out == {"eval_split": "validation"}


def test_column_of_identifiers_is_not_proposed_if_another_one_looks_like_a_label() -> None:
    table = pa.table(
        {
            "text": [f"a text of row {n}" for n in range(900)],
            "label": [f"{n:013}" for n in range(900)],
            "category": [f"kind {n % 5}" for n in range(900)],
        }
    )
    assert label_columns(table, named=False) == ["category"]
    assert label_columns(table.drop_columns("category"), named=False) == ["label"], "named so, but doubtful"
    assert has_many_classes(table, "label")
