"""Data sets with configurations and splits, as on the hub; read here from a clone, a folder with the same content."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hwopt.config.job import Data
from hwopt.data.sources.reading import read_all, refuse_missing
from hwopt.data.sources.rows import ReadOptions
from hwopt.errors import DataError

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
