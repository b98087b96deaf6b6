"""Bad rows: each is counted once, by its line in the file, and the others are trained on unchanged."""

import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from task_rows import job_of, prepared_of

from hwopt import api
from hwopt.config.job import Job
from hwopt.data.bad_rows import MAX_CONSECUTIVE, BadRows
from hwopt.errors import DataError, InputError
from hwopt.tasks.prepared import Prepared
from hwopt.testing import TINY_BERT, plan_for, rewound, saved_bits, tiny_job, tiny_profile

FIGURE = (
    "corrupt rows, 1 % and 10 % of 800",
    "{tests} of {tests} tests of CSV, TSV, JSONL, Parquet: each counted once, by its line; the same ones after resume",
)
Cells = tuple[str, str]
"""Text and label."""


def prepare(source: str, folder: Path, **data: Any) -> Prepared:
    return prepared_of(job_of("text-classification", {"train": source, "max_bad_rows": 0.5, **data}), folder)


def good(number: int) -> Cells:
    return f"number {number} of them", ("even", "odd")[number % 2]


GOOD = {"csv": "{0},{1}", "tsv": "{0}\t{1}", "jsonl": '{{"text": "{0}", "label": "{1}"}}'}
BAD = {
    "csv": ["{0}", "{0},{1},more", ",{1}", "{0},", '"{0},{1}', '"{0}"x,{1}', "caf\xe9,{1}", "  ,{1}"],
    "tsv": ["{0}", "{0}\t{1}\tmore", "\t{1}", "\xff\xff\t{1}"],
    "jsonl": [
        *('{{"text": "{0}", "label": "{1}', '{{"text": "{0}"}}', '{{"label": "{1}"}}', '{{"text": 7, "label": "{1}"}}', "null"),
        *('{{"text": "{0}", "label": ["{1}"]}}', '["{0}", "{1}"]', '{{"text": "\xe9", "label": "odd"}}'),
    ],
}


def write_rows(kind: str, path: Path, rows: list[Cells], bad: list[int], clean: bool = False) -> str:
    """Write `rows` to a file. The rows in `bad` are corrupted in the ways of `kind` in turn, or omitted if `clean`."""
    if kind == "parquet":
        texts: list[str | None] = [text for text, _ in rows]
        labels: list[str | None] = [label for _, label in rows]
        for number, row in enumerate(bad):
            if number % 3 == 0:
                texts[row] = None
            elif number % 3 == 1:
                labels[row] = None
            else:
                labels[row] = ""
        kept = [row for row in range(len(rows)) if not (clean and row in bad)]
        columns = {"text": [texts[row] for row in kept], "label": [labels[row] for row in kept]}
        pyarrow.parquet.write_table(pa.table(columns), path)
        return str(path)
    lines = {"csv": ["text,label"], "tsv": ["text\tlabel"], "jsonl": []}[kind]
    for row, cells in enumerate(rows):
        if row not in bad:
            lines.append(GOOD[kind].format(*cells))
        elif not clean:
            lines.append(BAD[kind][bad.index(row) % len(BAD[kind])].format(*cells))
    path.write_bytes(("\n".join(lines) + "\n").encode("latin-1"))
    return str(path)


@pytest.mark.parametrize("share", [0.01, 0.1])
@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl", "parquet"])
def test_each_bad_row_is_counted_once_and_the_others_are_exact(kind: str, share: float, tmp_path: Path) -> None:
    rows = [good(number) for number in range(800)]
    bad = sorted(random.Random(kind).sample(range(1, len(rows) - 1), int(share * len(rows))))
    source = write_rows(kind, tmp_path / f"train.{kind}", rows, bad)
    clean = prepare(write_rows(kind, tmp_path / f"clean.{kind}", rows, bad, clean=True), tmp_path)
    unit, first = ("row", 1) if kind == "parquet" else ("line", 1 if kind == "jsonl" else 2)
    assert clean.bad_rows == []
    for _ in range(2):  # first built, then loaded from the cache
        found = prepare(source, tmp_path)
        assert len(found.bad_rows) == 1
        assert found.bad_rows[0]["rows"] == len(rows)
        assert [entry[unit] for entry in found.bad_rows[0]["left_out"]] == [row + first for row in bad]
        assert [note for note in found.warnings if note.startswith(f"skipped {len(bad)} of 800 rows of {source}: {unit}s ")]
        for name in ("input_ids", "labels", "offsets"):
            assert found.train.array(name).tolist() == clean.train.array(name).tolist()
    with pytest.raises(DataError, match=r"Fix or remove it, or set data\.on_bad_row = 'skip'"):
        prepare(source, tmp_path, on_bad_row="stop")


def test_limit_counts_the_rows_of_the_file_if_a_part_is_held_out(tmp_path: Path) -> None:
    """Of 40 rows one is bad, 2.5 %: of the fifth that is left for training it would be 12.5 %."""
    rows = [good(number) for number in range(40)]
    source = write_rows("jsonl", tmp_path / "train.jsonl", rows, [3])
    found = prepare(source, tmp_path, eval_fraction=0.8, max_bad_rows=0.03, label="label")
    assert found.bad_rows[0]["rows"] == 40


def test_column_that_is_text_and_label_is_refused(tmp_path: Path) -> None:
    source = write_rows("jsonl", tmp_path / "train.jsonl", [good(number) for number in range(9)], [])
    with pytest.raises(InputError, match="data.text and data.label both name the column 'text'"):
        prepare(source, tmp_path, label="text")


def test_hundred_consecutive_bad_rows_are_an_error(tmp_path: Path) -> None:
    rows = [good(number) for number in range(400)]
    fine = write_rows("jsonl", tmp_path / "fine.jsonl", rows, list(range(50, 50 + MAX_CONSECUTIVE - 1)))
    assert len(prepare(fine, tmp_path).train) == 400 - MAX_CONSECUTIVE + 1
    source = write_rows("jsonl", tmp_path / "train.jsonl", rows, list(range(50, 50 + MAX_CONSECUTIVE)))
    with pytest.raises(DataError, match=r"train\.jsonl:150: .* The 100 rows up to here cannot be used\. "):
        prepare(source, tmp_path)


def test_rows_over_several_lines_are_numbered_by_their_first_line(tmp_path: Path) -> None:
    """A quoted cell may contain line ends. An unclosed quote spoils only its own line."""
    source = tmp_path / "a.csv"
    source.write_text('text,label\n"two\nlines",a\n\n"open,b\nlast,b\nx,y,z\n"more\n\nlines",a\n,a\n', encoding="utf-8")
    found = prepare(str(source), tmp_path)
    assert [entry["line"] for entry in found.bad_rows[0]["left_out"]] == [5, 7, 11]
    texts = [found.tokenizer.decode(found.train.row(index)["input_ids"]) for index in range(len(found.train))]
    assert texts == ["[CLS] two lines [SEP]", "[CLS] last [SEP]", "[CLS] more lines [SEP]"]


def test_note_lists_up_to_five_lines_and_counts_reasons() -> None:
    bad_rows = BadRows("a.csv", "line", strict=False, max_fraction=1.0)
    bad_rows.add(1_700, "has no text")
    bad_rows.add(1_700, "has no label")
    bad_rows.check([2])
    assert bad_rows.note() == "skipped 1 of 2 rows of a.csv: line 1,700 (has no text)"
    for number in range(3, 9):
        bad_rows.add(number, "is not valid JSON: Expecting value")
    assert bad_rows.note() == "skipped 7 of 8 rows of a.csv: lines 3, 4, 5, 6, 7, … (6 x is not valid JSON; 1 x has no text)"


def test_resume_skips_the_same_rows(tmp_path: Path) -> None:
    """Also if the token cache is rebuilt."""
    rows = [good(number) for number in range(80)]
    bad = sorted(random.Random(1).sample(range(1, len(rows) - 1), 4))
    job = tiny_job(tmp_path / "data", max_steps=12, save_steps=4)
    write_rows("jsonl", tmp_path / "data" / "train.jsonl", rows, bad)
    write_rows("jsonl", tmp_path / "data" / "eval.jsonl", rows[:12], [])
    plan = plan_for(tiny_profile(), job)
    run = tmp_path / "run"
    api.execute(plan, run, cache=tmp_path / "cache")
    for cache in ("cache", "another"):
        again = rewound(run, tmp_path / f"again-{cache}", 4)
        (again / "left_out.json").unlink()
        api.execute(plan, again, cache=tmp_path / cache, resume=True)
        assert saved_bits(again / "checkpoint-12") == saved_bits(run / "checkpoint-12")
        (found,) = json.loads((again / "left_out.json").read_text(encoding="utf-8"))
        assert [entry["line"] for entry in found["left_out"]] == [row + 1 for row in bad]


GERMAN = [("Das Essen war gut", "gut"), ("Sehr schön", "größer"), ("Die Straße ist laut", "öde"), ("Ein Tisch", "gut")] * 20


def write_german(path: Path, encoding: str, delimiter: str = ",") -> str:
    lines = [f"text{delimiter}label", *(f"{text}{delimiter}{label}" for text, label in GERMAN)]
    path.write_bytes("\r\n".join(lines).encode(encoding))
    return str(path)


def test_windows_file_is_refused_with_its_encoding(tmp_path: Path) -> None:
    source = write_german(tmp_path / "a.csv", "cp1252")
    message = r"a\.csv: 40 of 80 rows cannot be used, more than 5%: .* looks like cp1252: set data\.encoding = 'cp1252'"
    with pytest.raises(DataError, match=message):
        prepare(source, tmp_path, max_bad_rows=None)
    found = prepare(source, tmp_path, max_bad_rows=None, encoding="cp1252")
    assert found.label_names == ("größer", "gut", "öde")
    assert len(found.train) == 80
    assert not found.warnings


def test_label_of_bad_rows_only_is_refused(tmp_path: Path) -> None:
    lines = ["text,label", *(f"row {number},{'ab'[number % 2]}" for number in range(100)), ",c"]
    (tmp_path / "a.csv").write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"this label occurs only in rows that cannot be used: 'c' \(1 x\)"):
        prepare(str(tmp_path / "a.csv"), tmp_path, max_bad_rows=None)
    assert prepare(str(tmp_path / "a.csv"), tmp_path, max_bad_rows=0.05).label_names == ("a", "b")


@pytest.mark.parametrize("delimiter", [";", "\t", "|"])
def test_delimiter_is_guessed_from_the_header(delimiter: str, tmp_path: Path) -> None:
    source = write_german(tmp_path / "a.csv", "utf-8-sig", delimiter)
    assert len(prepare(source, tmp_path).train) == 80
    with pytest.raises(DataError, match="has no column 'text'"):
        prepare(source, tmp_path, delimiter="," if delimiter != "," else ";")


def test_unknown_encoding_is_refused() -> None:
    with pytest.raises(ValueError, match="not a text encoding of Python"):
        Job.model_validate({"model": {"config": TINY_BERT}, "data": {"train": "a.csv", "encoding": "cp12520"}})
