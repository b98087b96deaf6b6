"""Folders are complete or absent: every operation of a write fails, or ends the process, once."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwopt.errors import StorageError, exit_code_of, is_disk_full
from hwopt.plugin.guard import raise_plugin_error
from hwopt.system import atomic_folder as storage
from hwopt.system.atomic_folder import MANIFEST, find_corruption, repair_interrupted_write, staged, write_json

FILES = {"model.safetensors": b"weights" * 500, "config.json": b"{}", "adapter/adapter.safetensors": b"more" * 100, "empty": b""}


def write(target: Path, mark: bytes = b"") -> None:
    with staged(target, 0) as folder:
        for name, content in FILES.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content + mark)


def mark_of(target: Path) -> bytes:
    assert find_corruption(target) == ""
    return (target / "config.json").read_bytes().removeprefix(FILES["config.json"])


def test_written_folder_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "run folder ü" / "checkpoint-1"
    write(target, b"old")
    write(target, b"new")
    assert mark_of(target) == b"new"
    assert [path.name for path in target.parent.iterdir()] == ["checkpoint-1"]


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


@pytest.mark.parametrize("name", [*FILES, MANIFEST])
def test_missing_file_is_named(name: str, complete: Path) -> None:
    before = (complete / name).read_bytes()
    (complete / name).unlink()
    try:
        assert name in find_corruption(complete)
    finally:
        (complete / name).write_bytes(before)


def test_extra_file_is_named(complete: Path) -> None:
    (complete / "pytorch_model.bin").write_bytes(b"pickle")
    try:
        assert "pytorch_model.bin is not listed" in find_corruption(complete)
    finally:
        (complete / "pytorch_model.bin").unlink()


@pytest.mark.parametrize(
    ("manifest", "why"),
    [
        (b"", "cannot be read"),
        (b'{"format": 1, "files": {"config.json": 3}}', "cannot be read"),
        (b'{"format": 2, "files": {}}', "has format 2"),
    ],
)
def test_invalid_manifest_is_reported(manifest: bytes, why: str, complete: Path) -> None:
    before = (complete / MANIFEST).read_bytes()
    (complete / MANIFEST).write_bytes(manifest)
    try:
        assert why in find_corruption(complete)
    finally:
        (complete / MANIFEST).write_bytes(before)


CALLS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "fsync")
"""What may fail, or be the last thing that a process does: Python's own audit events, and fsync."""
DYING = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from system.test_atomic_folder import CALLS, write

target, last = Path(sys.argv[1]), int(sys.argv[2])
done = 0

def die(event, arguments=()):
    global done
    if event in CALLS and str(target.parent) in str(arguments):
        done += 1
        if done == last:
            os._exit(9)

fsync = os.fsync
os.fsync = lambda number: (die("fsync", str(target)), fsync(number))[1]
sys.addaudithook(die)
write(target, b"new")
"""


def killed_at(target: Path, call: int) -> int:
    command = [sys.executable, "-c", DYING, str(target), str(call), str(Path(__file__).parents[1])]
    return subprocess.run(command, check=False, capture_output=True).returncode


def test_dying_process_leaves_a_complete_folder(tmp_path: Path) -> None:
    """The process dies at every fifth call; in the long form at every call."""
    every_call_of_a_process_that_dies(tmp_path, range(1, 200, 5))


@pytest.mark.soak
def test_process_dying_at_any_call_leaves_a_complete_folder(tmp_path: Path) -> None:
    every_call_of_a_process_that_dies(tmp_path, range(1, 200))


def every_call_of_a_process_that_dies(folder: Path, calls: range) -> None:
    marks = set()
    for call in calls:
        target = folder / str(call) / "checkpoint-1"
        write(target, b"old")
        code = killed_at(target, call)
        repair_interrupted_write(target)
        marks.add(mark_of(target))
        assert [path.name for path in target.parent.iterdir()] == [target.name]
        if code == 0:
            assert mark_of(target) == b"new"
            break
        assert code == 9
    else:
        pytest.fail("the write still failed at call 99")
    assert marks == {b"old", b"new"}


def failing(call: int, error: OSError, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make the `call`-th disk operation and all later ones raise `error`. Returns a counter."""
    counted = [0]

    def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*arguments: Any, **options: Any) -> Any:
            counted[0] += 1
            if counted[0] >= call:
                raise error
            return original(*arguments, **options)

        return operation

    for name in ("fsync", "rename", "mkdir", "open"):
        monkeypatch.setattr(storage.os, name, wrapped(getattr(os, name)))
    return counted


def message_of(target: Path) -> str:
    try:
        write(target, b"new")
    except StorageError as error:
        return str(error)
    return ""


def test_disk_failing_at_any_call_keeps_the_folder(tmp_path: Path) -> None:
    for call in range(1, 100):
        target = tmp_path / str(call) / "checkpoint-1"
        write(target, b"old")
        with pytest.MonkeyPatch.context() as patched:
            counted = failing(call, OSError(28, "No space left on device"), patched)
            message = message_of(target)
        assert not message or f"{target} could not be written: No space left on device (needs " in message
        assert not message or "GiB are free" in message
        repair_interrupted_write(target)
        assert mark_of(target) in (b"old", b"new")
        if counted[0] < call:
            assert mark_of(target) == b"new"
            return
    pytest.fail("the write still failed at call 99")


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


@pytest.mark.parametrize(
    ("number", "free", "remedy"),
    [(errno.ENOSPC, 0, "Free some space"), (errno.ENOSPC, 2**40, r"number of files \(df -i\)")],
    ids=["bytes", "files"],
)
def test_disk_error_suggests_a_remedy(
    number: int, free: int, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    with pytest.raises(StorageError, match=remedy), staged(tmp_path / "folder", 2**30):
        raise OSError(number, os.strerror(number))


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left"), OSError(errno.EDQUOT, "Quota"), Exception("No space left on device (os error 28)")],
    ids=["a disk", "a quota", "tokenizers"],
)
def test_full_disk_is_recognized_in_other_errors(error: Exception, tmp_path: Path) -> None:
    """Packages written in Rust raise a bare Exception for a full disk. It is a StorageError, not an error of the plugin."""
    with pytest.raises(StorageError, match="GiB are free"), staged(tmp_path / "folder", 0):
        raise error
    with pytest.raises(StorageError, match=r"^plugin 'x': its step: .*\. Free some space"):
        raise_plugin_error(error, "plugin 'x'", "its step")
    assert exit_code_of(error) == StorageError.exit_code
    assert not is_disk_full(ValueError("(os error 2)"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(("arguments", "code"), [(["run", "no-such.toml"], 2), (["profiles"], 6)], ids=["a bad job", "a listing"])
def test_full_disk_of_stdout_keeps_the_exit_code(arguments: list[str], code: int, unbuffered: str) -> None:
    """Python exits with 120 if it cannot flush its buffers at exit."""
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = subprocess.run(
            [sys.executable, "-m", "hwopt", *arguments],
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            stdout=full,
            stderr=full,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    assert done.returncode == code
