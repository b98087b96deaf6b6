import json
from pathlib import Path

import pytest

from hwopt.config.job import make_job
from hwopt.data.sources import demo
from hwopt.data.sources.demo import demo_document, demo_samples
from hwopt.errors import DataError


def library(folder: Path, packages: int = 10, samples: int = 80) -> Path:
    for package in range(packages):
        inside = folder / f"package{package}"
        (inside / "tests").mkdir(parents=True)
        (inside / "tests" / "test_it.py").write_text('"""A docstring that is not used."""')
        code = [f'def f{number}():\n    """Function {number} of package {package}."""\n' for number in range(samples + package)]
        code += ['def g():\n    """The same everywhere."""\n', 'def h():\n    """Too short."""\n']
        (inside / "code.py").write_text("".join(code))
    (folder / "broken.py").write_text("def (")
    (folder / "old.py").write_text('"""A module with\\\n an old escape."""\nx = "\\d"\n')
    return folder


def test_demo_samples_are_distinct_and_from_eight_packages(tmp_path: Path) -> None:
    train, held_out = demo_samples(library(tmp_path))
    texts = [text for text, _ in train + held_out]
    assert len(set(texts)) == len(texts) == sum(80 + package for package in range(2, 10))
    assert {label for _, label in train} == {f"package{package}" for package in range(2, 10)}  # those with most docstrings
    assert len(held_out) == pytest.approx(len(texts) / 5, abs=1)
    assert all(f"package {label.removeprefix('package')}." in text for text, label in train)
    assert (train, held_out) == demo_samples(tmp_path)


def test_demo_without_sources_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"0 docstrings of 0 packages.*no sources of its standard library"):
        demo_samples(tmp_path / "python311.zip")
    with pytest.raises(DataError, match=r"602 docstrings of 3 packages; the demo needs 400 docstrings of 8 packages"):
        demo_samples(library(tmp_path, 2, 300))


def test_demo_job_is_read_like_any_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(library(tmp_path / "lib")))
    document = demo_document(tmp_path / "cache")
    job = make_job(document).job
    rows = [json.loads(line) for line in Path(job.data.train).read_text().splitlines()]
    assert set(rows[0]) == {"text", "label"}
    monkeypatch.setattr(demo, "demo_samples", None)  # the samples are read once
    assert demo_document(tmp_path / "cache").data == document.data
    assert make_job(document, ["training.max_steps=3"]).job.training.max_steps == 3


def test_this_python_has_enough_docstrings_for_the_demo(tmp_path: Path) -> None:
    job = make_job(demo_document(tmp_path)).job
    train = Path(job.data.train).read_text(encoding="utf-8").splitlines()
    assert 1_500 < len(train) < 10_000
    assert len({json.loads(line)["label"] for line in train}) == 8
