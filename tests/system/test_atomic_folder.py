"""Corrupt folders are found, a failed write says what to do. `integration/test_reliability.py` fails each operation of a save."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwopt.errors import StorageError, exit_code_of, is_disk_full
from hwopt.plugin.guard import raise_plugin_error
from hwopt.system import atomic_folder as storage
from hwopt.system.atomic_folder import MANIFEST, find_corruption, staged, write_json

FILES = {"model.safetensors": b"weights" * 500, "config.json": b"{}", "adapter/adapter.safetensors": b"more" * 100, "empty": b""}


def write(target: Path) -> None:
    with staged(target, 0) as folder:
        for name, content in FILES.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("damage") / "checkpoint-1"
    write(target)
    return target


@given(st.sampled_from([*FILES, MANIFEST]), st.floats(0, 1, exclude_max=True), st.integers(1, 255))
def test_flipped_byte_is_found(complete: Path, name: str, place: float, flip: int) -> None:
    path = complete / name
    before = path.read_bytes()
    if not before:
        return
    at = int(place * len(before))
    path.write_bytes(before[:at] + bytes([before[at] ^ flip]) + before[at + 1 :])
    try:
        # changed white space in the manifest has no effect
        assert find_corruption(complete) or (name == MANIFEST and before[at : at + 1].isspace())
    finally:
        path.write_bytes(before)
    assert find_corruption(complete) == ""


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        *((name, None, name) for name in [*FILES, MANIFEST]),
        ("pytorch_model.bin", b"pickle", "pytorch_model.bin is not listed"),
        (MANIFEST, b"", "cannot be read"),
        (MANIFEST, b'{"format": 1, "files": {"config.json": 3}}', "cannot be read"),
        (MANIFEST, b'{"format": 2, "files": {}}', "has format 2"),
    ],
)
def test_missing_extra_and_invalid_files_are_named(name: str, content: bytes | None, why: str, tmp_path: Path) -> None:
    write(tmp_path / "folder")
    path = tmp_path / "folder" / name
    path.unlink(missing_ok=True)
    if content is not None:
        path.write_bytes(content)
    assert why in find_corruption(tmp_path / "folder")


def test_json_is_written_completely_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    write_json(path, {"exit_code": 0})
    before = path.read_bytes()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(storage.os, "fsync", lambda number: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        with pytest.raises(StorageError, match=r"status.json could not be written: Input/output error"):
            write_json(path, {"exit_code": 1})
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["status.json"]


@pytest.mark.parametrize(("free", "remedy"), [(0, "Free some space"), (2**40, r"number of files \(df -i\)")])
def test_full_disk_suggests_a_remedy(free: int, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    with pytest.raises(StorageError, match=remedy), staged(tmp_path / "folder", 2**30):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("error", [OSError(errno.EDQUOT, "Quota"), Exception("No space left on device (os error 28)")])
def test_full_disk_is_recognized_in_other_errors(error: Exception, tmp_path: Path) -> None:
    """Packages written in Rust raise a bare Exception for a full disk. It is a StorageError, not an error of the plugin."""
    with pytest.raises(StorageError, match="GiB are free"), staged(tmp_path / "folder", 0):
        raise error
    with pytest.raises(StorageError, match=r"^plugin 'x': its step: .*\. Free some space"):
        raise_plugin_error(error, "plugin 'x'", "its step")
    assert exit_code_of(error) == StorageError.exit_code
    assert not is_disk_full(ValueError("(os error 2)"))
