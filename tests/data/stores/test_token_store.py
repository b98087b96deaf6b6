from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwopt.data.stores.token_store import TokenStore, fingerprint, split_by_label, split_rows, write_cache_folder
from hwopt.errors import DataError, StorageError


@given(samples=st.integers(2, 300), fraction=st.floats(0.01, 0.99), seed=st.integers(0, 2**63 - 1))
def test_split_is_a_partition_that_the_seed_decides(samples: int, fraction: float, seed: int) -> None:
    if not 0 < round(samples * fraction) < samples:
        with pytest.raises(DataError, match="both sides need at least one"):
            split_rows(samples, fraction, seed, "a.csv")
        return
    train, held_out = split_rows(samples, fraction, seed, "a.csv")
    assert sorted([*train, *held_out]) == list(range(samples))
    assert len(held_out) == round(samples * fraction)
    assert (np.diff(train) > 0).all()
    assert (split_rows(samples, fraction, seed, "b.csv")[1] == held_out).all()
    assert (split_rows(100, 0.5, seed, "")[0] != split_rows(100, 0.5, seed + 1, "")[0]).any()


@given(
    counts=st.lists(st.integers(1, 60), min_size=2, max_size=6), fraction=st.floats(0.01, 0.99), seed=st.integers(0, 2**63 - 1)
)
def test_split_by_label_keeps_the_share_of_each_label(counts: list[int], fraction: float, seed: int) -> None:
    labels = [f"label {number}" for number, count in enumerate(counts) for _ in range(count)]
    wanted = round(len(labels) * fraction)
    if not 0 < wanted < len(labels):
        with pytest.raises(DataError, match="both sides need at least one"):
            split_by_label(labels, fraction, seed, "a.csv")
        return
    train, held_out = split_by_label(labels, fraction, seed, "a.csv")
    assert sorted([*train, *held_out]) == list(range(len(labels)))
    assert len(held_out) == wanted
    assert (np.diff(train) > 0).all()
    assert (split_by_label(labels, fraction, seed, "b.csv")[1] == held_out).all()
    if len(labels) - wanted < len(counts):
        return
    for number, count in enumerate(counts):
        mine = sum(labels[row] == f"label {number}" for row in held_out)
        assert mine < count
        if all(count * (1 - fraction) > 2 for count in counts):  # no label is limited by the row that it keeps
            assert abs(mine - count * wanted / len(labels)) < 1


def test_fingerprint_differs_for_different_parts() -> None:
    parts: list[tuple[Any, ...]] = [(["ab", "c"],), (["a", "bc"],), (["ab"], ["c"]), (["abc"],), ([1, 2],), ([2, 1],), ([],)]
    assert len({fingerprint(*part) for part in parts}) == len(parts)


def make(lengths: list[int], per_token: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    tokens = sum(lengths)
    arrays = {
        "input_ids": np.arange(tokens, dtype=np.int32),
        "offsets": np.cumsum([0, *lengths]),
        "labels": np.arange(tokens if per_token else len(lengths)) + 100,
        "counts": np.array(lengths if per_token else [1] * len(lengths), np.int32),
    }
    return arrays, {"labels_per_token": per_token, "samples": len(lengths)}


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=20), per_token=st.booleans())
def test_rows_equal_what_was_stored(tmp_path_factory: pytest.TempPathFactory, lengths: list[int], per_token: bool) -> None:
    store = TokenStore.cached(tmp_path_factory.mktemp("store") / "s", lambda: make(lengths, per_token))
    assert len(store) == len(lengths)
    assert store.lengths.tolist() == lengths
    assert store.lengths.dtype == store.counts.dtype == np.int32
    rows = [store.row(index) for index in range(len(store))]
    assert np.concatenate([row["input_ids"] for row in rows]).tolist() == list(range(sum(lengths)))
    key = "labels" if per_token else "row_labels"
    assert [row[key].ndim for row in rows] == [int(per_token)] * len(lengths)
    assert np.concatenate([row[key].reshape(-1) for row in rows]).tolist() == store.array("labels").tolist()
    assert "token_type_ids" not in rows[0]


def test_store_is_cached_and_rebuilt_if_broken(tmp_path: Path) -> None:
    folder, made = tmp_path / "tokens" / "s", []

    def counted() -> tuple[dict[str, Any], dict[str, Any]]:
        made.append(1)
        return make([2, 3], False)

    (tmp_path / "tokens" / ".s.left-over").mkdir(parents=True)  # left by a killed run
    for _ in range(2):
        assert len(TokenStore.cached(folder, counted)) == 2
    assert len(made) == 1
    for number, (name, content) in enumerate((("labels.npy", "cut short"), ("meta.json", "{")), 2):
        (folder / name).write_text(content)
        assert TokenStore.cached(folder, counted).row(0)["row_labels"] == 100
        assert len(made) == number
    assert sorted(file.name for file in folder.parent.iterdir()) == [".s.left-over", "s"]


def test_failed_cache_write_leaves_no_files(tmp_path: Path) -> None:
    def full(staged: Path) -> None:
        (staged / "half").write_text("x")
        raise OSError(28, "No space left on device")

    with pytest.raises(StorageError, match=r"cannot write the cache \(No space left on device\); set HWOPT_CACHE"):
        write_cache_folder(tmp_path / "cache" / "s", full)
    assert not list((tmp_path / "cache").iterdir())
