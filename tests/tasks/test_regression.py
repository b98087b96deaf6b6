"""Preparation and loss of regression."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from task_rows import job_of, prepare_rows, write_jsonl

from hwopt.errors import DataError, InputError
from hwopt.tasks.prepared import Prepared
from hwopt.tasks.recognition import recognise
from hwopt.tasks.registry import make_task

ROWS = [{"text": f"text {n}", "score": n / 10, "size": n} for n in range(10)]


KIND = "regression"


def prepare(folder: Path, rows: list[dict[str, Any]], **data: Any) -> Prepared:
    return prepare_rows(KIND, folder, rows, {"label": "score"} | data)


def test_several_targets_are_columns(tmp_path: Path) -> None:
    prepared = prepare(tmp_path, [{**row, "size": row["size"] * 10} for row in ROWS], label=["score", "size"])
    assert prepared.label_names == ("score", "size")
    assert prepared.train.row(3)["row_labels"].tolist() == pytest.approx([0.3, 30])
    assert prepared.train.counts.tolist() == [2] * 10
    assert prepared.notes == [
        "'size' has mean 45 and standard deviation 28.72: training is faster with targets scaled to about -1 to 1"
    ]


@pytest.mark.parametrize("first", [2**60, 1e9])
def test_targets_that_float32_rounds_are_named(first: float, tmp_path: Path) -> None:
    notes = prepare(tmp_path, [{"text": "a", "score": int(first) + 1_000 * number} for number in range(8)]).notes
    assert any("'score' is trained in steps of" in note and "to which float32 rounds it" in note for note in notes)


def test_rows_without_a_number_are_bad(tmp_path: Path) -> None:
    values = (None, float("inf"), "1.5", 1e39, -1e300)
    rows = [*ROWS * 10, *({"text": "a", "score": value} for value in values)]
    source = tmp_path / "rows.csv"
    source.write_text("text,score\n" + "".join(f"{row['text']},{row['score']}\n" for row in rows))
    prepared = prepare(tmp_path, ROWS, train=str(source))
    assert len(prepared.train) == 101
    assert [each["why"] for each in prepared.bad_rows[0]["left_out"]] == [
        "'score' is not a number: 'None'",
        "'score' is not a number: 'inf'",
        "'score' is too large for float32: '1e+39'",
        "'score' is too large for float32: '-1e+300'",
    ]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"text": "a", "score": 1.5}] * 8, "every 'score' is 1.5; regression needs different values"),
        ([{"text": "a", "score": 2**60 + number} for number in range(8)], "is 1.15292e\\+18 in float32; regression needs"),
        ([{"text": "a", "score": "good"}] * 8, "none of its 8 rows can be used.*'score' is not a number: 'good'"),
    ],
)
def test_unsuitable_column_is_a_data_error(rows: list[dict[str, Any]], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        prepare(tmp_path, rows)


@pytest.mark.parametrize(("key", "value"), [("label_smoothing", 0.1), ("class_weights", "balanced")])
def test_options_for_classes_are_refused(key: str, value: Any) -> None:
    with pytest.raises(InputError, match=rf"task\.{key}(: the loss of| belongs to) task\.kind = "):
        job_of(KIND, {"train": "a.csv"}, **{key: value})


def test_loss_is_the_sum_that_torch_averages() -> None:
    task = make_task(job_of(KIND, {"train": "a.csv"}))
    logits, targets = torch.randn(5, 2), torch.randn(5, 2)
    summed, count = task.loss(SimpleNamespace(logits=logits), targets)
    assert summed / count == pytest.approx(torch.nn.functional.mse_loss(logits, targets).item())


@pytest.mark.parametrize(
    ("rows", "kind"),
    [
        ([{"text": f"t {n}", "label": n / 7} for n in range(20)], "regression"),
        ([{"text": f"t {n}", "label": "ab"[n % 2], "confidence": n / 7} for n in range(20)], "text-classification"),
        ([{"text": f"t {n}", "price": n / 7} for n in range(20)], "regression"),
        ([{"question": f"q {n}?", "answer": f"a {n}", "weight": n / 7} for n in range(20)], "causal-lm"),
    ],
)
def test_column_of_fractions_is_recognised(rows: list[dict[str, Any]], kind: str, tmp_path: Path) -> None:
    assert recognise(write_jsonl(tmp_path / "rows.jsonl", rows)).kind == kind


def prices(path: Path, values: list[str]) -> str:
    path.write_text("text;price\n" + "".join(f"text {n};{value}\n" for n, value in enumerate(values)))
    return str(path)


def test_all_files_of_a_job_have_one_number_format(tmp_path: Path) -> None:
    train = prices(tmp_path / "train.csv", ["1234,50", "1500", "0,5", "12"] * 3)
    held_out = prices(tmp_path / "eval.csv", ["0,100", "2"])
    prepared = prepare(tmp_path, ROWS, train=train, eval=held_out, label="price", decimal=",")
    assert prepared.train.array("labels").flatten().tolist()[:4] == pytest.approx([1234.5, 1500, 0.5, 12])
    assert prepared.eval.array("labels").flatten().tolist() == pytest.approx([0.1, 2])
    mixed = [{"text": "a", "price": value} for value in ("1,5", 2.5, 3)]  # a number of JSON has no format
    assert prepare(tmp_path, mixed, label="price", decimal=",").train.array("labels").flatten().tolist() == [1.5, 2.5, 3]


@pytest.mark.parametrize(
    ("decimal", "value", "message"),
    [
        (".", "1,5", r"eval\.csv:3: 'price' is '1,5', not a number with a decimal point\. Set data\.decimal = \",\""),
        (".", "1,500", r"Set data\.decimal = \",\" if all .* a decimal comma; remove the comma if it separates thousands"),
        (",", "1.500", r"Set data\.decimal = \"\.\" if all .* a decimal point; remove the point if it separates thousands"),
        (",", "1.5", r"'price' is '1\.5', not a number with a decimal comma\. Set data\.decimal = \"\.\""),
        (",", "1.234,50", r"'price' is '1\.234,50'.*Remove the separators between the thousands"),
        (".", "1 500", "Remove the separators between the thousands"),
        (",", "1_500,5", "Remove the separators between the thousands"),
        (".", "\N{MINUS SIGN}5", 'Write the minus sign as "-"'),
    ],
)
def test_number_in_another_format_is_an_error_with_the_key(tmp_path: Path, decimal: str, value: str, message: str) -> None:
    train = prices(tmp_path / "train.csv", ["1", "2", "3"] * 4)
    held_out = prices(tmp_path / "eval.csv", ["1", value])
    with pytest.raises(DataError, match=message):
        prepare(tmp_path, ROWS, train=train, eval=held_out, label="price", decimal=decimal)


def test_init_proposes_the_decimal_comma_and_ignores_empty_cells(tmp_path: Path) -> None:
    found = recognise(prices(tmp_path / "train.csv", ["1234,5", "", "0,5", "12"] * 30))
    assert (found.kind, found.keys["label"], found.keys["decimal"]) == ("regression", "price", ",")
