"""Preparation and loss of multi-label classification."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from task_rows import job_of, prepare_rows, write_jsonl

from hwopt.errors import DataError
from hwopt.tasks.multi_label import MultiLabel
from hwopt.tasks.prepared import Prepared
from hwopt.tasks.recognition import recognise
from hwopt.tasks.registry import make_task

SETS = [["b"], ["a", "c"], [], ["c", "c", "a"]]
ARRAY = [[0, 1, 0], [1, 0, 1], [0, 0, 0], [1, 0, 1]]


KIND = "multi-label-classification"


def prepare(folder: Path, rows: list[dict[str, Any]], **data: Any) -> Prepared:
    return prepare_rows(KIND, folder, rows, {"label": "labels"} | data)


def rows_with(values: list[Any]) -> list[dict[str, Any]]:
    return [{"text": f"text {number}", "labels": value} for number, value in enumerate(values)]


@pytest.mark.parametrize(
    ("values", "data"),
    [
        (SETS, {}),
        ([", ".join(labels) for labels in SETS], {}),
        (["|".join(labels) for labels in SETS], {"label_delimiter": "|"}),
        (["b", ["a", "c"], [], "a,c"], {}),
        ([str(labels) for labels in SETS], {}),
        ([json.dumps(labels) for labels in SETS], {"label_delimiter": "|"}),
    ],
    ids=["lists", "commas", "other delimiter", "lists and texts", "lists as pandas writes them", "lists as hwopt writes them"],
)
def test_labels_are_lists_or_delimited(values: list[Any], data: dict[str, Any], tmp_path: Path) -> None:
    prepared = prepare(tmp_path, rows_with(values), **data)
    assert prepared.label_names == ("a", "b", "c")
    assert prepared.train.array("labels").tolist() == ARRAY
    assert prepared.train.counts.tolist() == [3] * 4


def test_booleans_in_lists_are_spelled_as_in_columns(tmp_path: Path) -> None:
    assert prepare(tmp_path, rows_with([[True], [False], [True, False], []])).label_names == ("false", "true")


def test_labels_in_lists_are_exact_and_those_of_a_text_have_no_blanks_around_them(tmp_path: Path) -> None:
    assert prepare(tmp_path, rows_with([["a", "a "], ["01", "1"], [" "], "a, 1"])).label_names == ("01", "1", "a", "a ")


def test_lists_of_python_may_have_both_kinds_of_quotes(tmp_path: Path) -> None:
    lists = [["Children's", "b"], ["b"], ['the "c"', "Children's"], []]
    assert prepare(tmp_path, rows_with([str(each) for each in lists])).label_names == ("Children's", "b", 'the "c"')


def test_one_column_of_0_and_1_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"every label in 'labels' is 0 or 1\. Name the columns of all labels in data\.label"):
        prepare(tmp_path, rows_with(["0", "1", "1", "0"]))
    assert prepare(tmp_path, rows_with([["0"], ["1"], ["0", "1"], []])).label_names == ("0", "1")


@pytest.mark.parametrize(("cells", "several"), [(["Smith, John", "Doe, Jane"], False), (["a, b", "b, c", "a, c", "c"], True)])
def test_comma_in_a_name_makes_no_sets_of_labels(cells: list[str], several: bool) -> None:
    table = pa.table({"text": [f"text {number}" for number in range(24)], "label": (cells * 24)[:24]})
    found = MultiLabel.recognise(table, chosen=False)
    assert isinstance(found, str) != several


@pytest.mark.parametrize(("name", "several"), [("answers", False), ("answers.text", False), ("topics", True)])
def test_answers_to_questions_are_not_proposed_as_labels(name: str, several: bool) -> None:
    """A file of SQuAD has the lists `answers.text`."""
    names = [["Rome"], ["Oslo"], ["Rome"], ["Lima"]]
    table = pa.table({"context": [f"a city of {number}" for number in range(24)], name: names * 6})
    assert isinstance(MultiLabel.recognise(table, chosen=False), str) != several
    assert not isinstance(MultiLabel.recognise(table, chosen=True), str), "the user says what they are"


@pytest.mark.parametrize("values", [(0, 1), ("0", "1"), (False, True), ("false", "True"), (0.0, 1.0)])
def test_labels_are_columns_of_0_and_1(values: tuple[Any, Any], tmp_path: Path) -> None:
    rows = [{"text": "t", **{name: values[flag] for name, flag in zip("abc", row, strict=True)}} for row in ARRAY]
    prepared = prepare(tmp_path, rows, label=["a", "b", "c"])
    assert (prepared.label_names, prepared.train.array("labels").tolist()) == (("a", "b", "c"), ARRAY)


def test_numbers_of_a_data_set_have_its_names(tmp_path: Path) -> None:
    names = datasets.ClassLabel(names=["joy", "anger", "fear"])
    features = datasets.Features({"text": datasets.Value("string"), "labels": datasets.Sequence(names)})
    made = datasets.Dataset.from_dict({"text": ["a", "b"], "labels": [[2], [0, 2]]}, features=features)
    made.save_to_disk(str(tmp_path / "set"))
    prepared = prepare(tmp_path, [], train=str(tmp_path / "set"))
    assert (prepared.label_names, prepared.train.array("labels").tolist()) == (("joy", "fear"), [[0, 1], [1, 1]])


def test_rows_without_labels_are_bad_if_the_value_is_missing(tmp_path: Path) -> None:
    prepared = prepare(tmp_path, rows_with([*SETS * 20, None, ["a", None], ["new"]]), max_bad_rows=0.1)
    assert [each["why"] for each in prepared.bad_rows[0]["left_out"]] == [
        "'labels' has no value",
        "'labels' has an item that is not a label: None",
    ]
    held_out = write_jsonl(tmp_path / "eval.jsonl", rows_with([*SETS, ["d"]]))
    prepared = prepare(tmp_path, rows_with(SETS), eval=held_out, max_bad_rows=0.5)
    assert "has a label that is not in the training data: 'd'" in prepared.bad_rows[0]["left_out"][0]["why"]


def test_wrong_delimiter_is_noted(tmp_path: Path) -> None:
    assert prepare(tmp_path, rows_with(["a;b", "b", "c;a", "a"])).notes == [
        "no row has several labels, and 2 labels contain ';': set data.label_delimiter = ';' if it separates labels"
    ]


@pytest.mark.parametrize(
    ("rows", "data", "message"),
    [
        (rows_with([[], []]), {}, "no row has a label in 'labels'"),
        (rows_with(["['a' 'b']"] * 4), {}, r"'labels' is not a list of labels: \"\['a' 'b'\]\""),
        (rows_with([[0, 1, 0], [1, 0, 1]]), {}, r"rows\.jsonl:1: 'labels' is \[0, 1, 0\], a 0 or 1 for each label"),
        (rows_with([[1.0, 0.0, 1.0], [1.0, 0.0, 0.0]]), {}, r"'labels' is \[1\.0, 0\.0, 1\.0\]"),
        (rows_with([1, 2]), {}, "column 'labels' holds int64; labels must be lists, texts such as 'a, b'"),
        ([{"text": "t", "a": 0, "b": 2}] * 4, {"label": ["a", "b"]}, "'b' is neither 0 nor 1: 2"),
    ],
)
def test_unsuitable_column_is_a_data_error(
    rows: list[dict[str, Any]], data: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message):
        prepare(tmp_path, rows, **data)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_loss_is_the_sum_that_torch_averages(smoothing: float) -> None:
    task = make_task(job_of(KIND, {"train": "a.csv"}, label_smoothing=smoothing))
    logits, targets = torch.randn(4, 3), torch.tensor(ARRAY).float()
    trained = task.training_loss(SimpleNamespace(class_weights=None), "cpu")
    summed, count = trained(SimpleNamespace(logits=logits), targets)
    soft = targets.where(targets == 0, 1 - smoothing / 2).where(targets == 1, smoothing / 2)
    expected = torch.nn.functional.binary_cross_entropy_with_logits(logits, soft)
    assert summed / count == pytest.approx(expected.item())
    plain, _ = task.loss(SimpleNamespace(logits=logits), targets)
    assert (plain == summed) == (smoothing == 0)


def test_categorical_text_is_read(tmp_path: Path) -> None:
    columns = {"text": ["one", "two", "three", "four"], "labels": [", ".join(labels) for labels in SETS]}
    table = pa.table({name: pa.array(values).dictionary_encode() for name, values in columns.items()})
    parquet.write_table(table, tmp_path / "rows.parquet")
    assert recognise(str(tmp_path / "rows.parquet")).keys["text"] == ["text"]
    assert prepare(tmp_path, [], train=str(tmp_path / "rows.parquet")).train.array("labels").tolist() == ARRAY


@pytest.mark.parametrize("text", [pa.string(), pa.large_string(), pa.string_view()], ids=str)
def test_every_type_of_text_is_recognised_and_read(text: pa.DataType, tmp_path: Path) -> None:
    """Polars writes large strings."""
    columns = {"text": pa.array(["one", "two", "three", "four"], text), "labels": pa.array(SETS, pa.large_list(text))}
    parquet.write_table(pa.table(columns), tmp_path / "rows.parquet")
    found = recognise(str(tmp_path / "rows.parquet"))
    assert (found.kind, found.keys) == (KIND, {"text": ["text"], "label": "labels"})
    prepared = prepare(tmp_path, [], train=str(tmp_path / "rows.parquet"))
    assert prepared.train.array("labels").tolist() == ARRAY
