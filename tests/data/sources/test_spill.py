"""Large columns wait on disk while a file is read and tokenised."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from hwopt.data.sources.rows import ReadOptions
from hwopt.data.sources.spill import Spill, close
from hwopt.data.sources.tables import Texts, read_rows, text_columns
from hwopt.errors import StorageError

TEXTS = [f"{row} {'word ' * 20}" for row in range(25_000)]


@pytest.mark.parametrize("format", ["csv", "tsv", "jsonl", "parquet"])
def test_texts_of_a_large_file_are_not_held_in_memory(format: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{format}"
    if format == "jsonl":
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    elif format == "parquet":
        pyarrow.parquet.write_table(pa.table({"text": TEXTS}), path)
    else:
        path.write_text("text\n" + "".join(f"{text}\n" for text in TEXTS))
    before = pa.total_allocated_bytes()
    (texts,) = text_columns(read_rows(str(path), options=ReadOptions(strict=False)), ["text"])
    assert pa.total_allocated_bytes() - before < 0.5 * sum(map(len, TEXTS))  # the last rows stay
    assert list(texts) == TEXTS


ARRAYS = [pa.array(["a", None, "ö"] * 9_999), pa.array([{"a": b"x"}] * 19_999), pa.array(["a", "b"] * 9_999).dictionary_encode()]


@pytest.mark.parametrize("array", ARRAYS)
def test_array_from_disk_is_the_same(array: pa.Array) -> None:
    spill = Spill()
    small = pa.array(["small"])
    put = [spill.put(each) for each in (array, small, array)]
    assert isinstance(put[0], range)
    assert [spill.get(each) for each in put] == [array, small, array]


def test_arrays_stay_in_memory_without_a_cache_and_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HWOPT_CACHE", str(tmp_path / "file"))
    large, spill = pa.array(["text"] * 99_999), Spill()
    assert spill.put(large) is large
    spill.file = open("/dev/full", "wb")  # noqa: SIM115
    with pytest.raises(StorageError, match=r"cannot write the cache \(No space left on device\)"):
        spill.put(large)
    close(spill.file)


def test_rows_of_a_column_are_read_in_their_order() -> None:
    texts = Texts(pa.chunked_array([["a", "b"], ["c", None, "e"], ["f"]]))
    assert (list(texts), texts[-1], texts[1:4], texts[4:2]) == (["a", "b", "c", "", "e", "f"], "f", ["b", "c", ""], [])
    chosen = texts.take([1, 2, 3, 5])
    assert (list(chosen), chosen[1:3], chosen[-1], list(chosen.take([0, 3]))) == (["b", "c", "", "f"], ["c", ""], "f", ["b", "f"])
    with pytest.raises(IndexError):
        chosen[4]
