"""CoNLL files are read sentence by sentence."""

from pathlib import Path

import pytest

from hwopt.data.sources.reading import read_all
from hwopt.data.sources.rows import ReadOptions, Rows
from hwopt.data.sources.tables import read_rows
from hwopt.errors import DataError

CONLL_2003 = """-DOCSTART- -X- -X- O

EU NNP B-NP B-ORG
rejects VBZ B-VP O

Peter NNP B-NP B-PER
Blackburn NNP I-NP I-PER
"""


def read(path: Path, text: str | bytes, strict: bool = False) -> Rows:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_rows(str(path), options=ReadOptions(strict=strict))


def test_sentences_are_rows_of_words_and_tags(tmp_path: Path) -> None:
    rows = read(tmp_path / "a.CONLL", CONLL_2003)
    assert rows.table.to_pydict() == {
        "tokens": [["EU", "rejects"], ["Peter", "Blackburn"]],
        "column_2": [["NNP", "VBZ"], ["NNP", "NNP"]],
        "column_3": [["B-NP", "B-VP"], ["B-NP", "I-NP"]],
        "tags": [["B-ORG", "O"], ["B-PER", "I-PER"]],
    }
    assert list(rows.places.numbers) == [3, 6]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("a\tO\r\nb\tB-X\r\n\r\nc\tO\r\n", [["a", "b"], ["c"]]),
        ("New York\tB-LOC\nis\tO\n", [["New York", "is"]]),
        ("# id = 3\na O\nb O\n\n# id = 4\n# O\nc O", [["a", "b"], ["#", "c"]]),
        ("\n\n \na O\n \nb O\n\n\n", [["a"], ["b"]]),
        ("\ufeffa O\n", [["a"]]),
    ],
    ids=["tabs", "space in a word", "comments", "blank lines", "byte order mark"],
)
def test_variants_of_the_format(text: str, tokens: list[list[str]], tmp_path: Path) -> None:
    assert read(tmp_path / "a.conll", text).table["tokens"].to_pylist() == tokens


@pytest.mark.parametrize("first", ["1", "1-2", "0.1"])
def test_conll_u_is_refused(first: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.conll: is CoNLL-U, which hwopt does not read"):
        read(
            tmp_path / "a.conll",
            f"# text = A b\n{first}\tA\ta\tX\tX\t_\t0\troot\t_\t_\n2\tb\tb\tX\tX\t_\t1\tdep\t_\tSpaceAfter=No\n",
        )


def test_text_files_of_a_glob_can_be_conll(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(f"{name} O\n\nc O\n")
    rows = read_all(f"{tmp_path}/*.txt", None, ReadOptions(format="conll"))
    assert rows.table["tokens"].to_pylist() == [["a"], ["c"], ["b"], ["c"]]


def test_file_of_words_alone_has_no_tags(tmp_path: Path) -> None:
    assert read(tmp_path / "a.conll", "a\nb\n\nc\n").table.to_pydict() == {"tokens": [["a", "b"], ["c"]]}


def test_bad_sentence_is_named_by_its_lines(tmp_path: Path) -> None:
    rows = read(tmp_path / "a.conll", b"a O\n\nb O\nc\n\nd\xe4 O\n\ne O\n")
    assert rows.table["tokens"].to_pylist() == [["a"], ["e"]]
    assert rows.bad_rows.reasons == {3: "line 4 has 1 column, the first line 2: 'c'", 6: "line 6 is not UTF-8 (byte 0xe4)"}
    with pytest.raises(DataError, match=r"a\.conll:3: line 4 has 1 column"):
        read(tmp_path / "a.conll", "a O\n\nb O\nc\n", strict=True)


def test_file_without_a_sentence_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no rows"):
        read(tmp_path / "a.conll", "-DOCSTART- O\n\n\n")
