"""`hwopt check` and `hwopt import` on the command line."""

import json
from pathlib import Path

import pytest
from command_line import hwopt

GOOD = "per_device_train_batch_size: 32\nlearning_rate: 3e-5\n"
BAD = "training:\n  fp16: true\n  bf16: true\n"


def test_check_exits_with_2_for_an_error_and_names_line_and_fix(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text(BAD)
    found = hwopt("check", "missing.yaml", "bad.yaml", "--card", "RTX 3070", cwd=tmp_path)
    assert found.returncode == 2
    assert "missing.yaml: no such file" in found.stderr
    assert "bad.yaml: Hugging Face TrainingArguments (by bf16, fp16)" in found.stdout
    assert "error    bad.yaml:3  [refused-pair]" in found.stdout
    assert "fix: training.fp16: false" in found.stdout
    assert "1 error, 0 warnings, 0 notes" in found.stdout


def test_check_exits_with_0_without_errors_and_with_2_for_warnings_if_strict(tmp_path: Path) -> None:
    (tmp_path / "good.yaml").write_text(GOOD)
    assert hwopt("check", "good.yaml", "--card", "T4", "--strict", cwd=tmp_path).returncode == 0
    (tmp_path / "warm.yaml").write_text("warmup_ratio: 0.5\nfp16: true\n")
    assert hwopt("check", "warm.yaml", "--card", "T4", cwd=tmp_path).returncode == 0
    assert hwopt("check", "warm.yaml", "--card", "T4", "--strict", cwd=tmp_path).returncode == 2


def test_check_as_json(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text(BAD)
    found = hwopt("check", "bad.yaml", "--card", "T4", "--format", "json", cwd=tmp_path)
    report = json.loads(found.stdout)
    assert found.returncode == 2
    assert report["format"] == "Hugging Face TrainingArguments"
    assert report["errors"] == 2
    assert {each["rule"] for each in report["findings"]} == {"card-feature", "refused-pair"}
    assert all(each["place"] == "bad.yaml:3" for each in report["findings"])


FILES = {
    "none.yaml": ("a: [1, 2\nb: 3\n", "none.yaml:2: is not valid YAML"),
    "tune.yaml": ("optimizer:\n  _component_: torchtune.x\n  lr: 1\n", "tune.yaml: is torchtune's, which hwopt does not"),
    "foreign.yaml": ("colour: red\nsize: 3\n", "foreign.yaml: not recognised; none of its keys (colour, size) is known"),
    "bad.json": ('{"fp16": true,\n}', "bad.json:2: is not valid JSON"),
    "train.py": ("args = 3\n", "train.py: has no call of TrainingArguments"),
    "bad.py": ("x = (\n", "bad.py:1: is not valid Python"),
}


@pytest.mark.parametrize("command", [("check",), ("import", "-o", "new")], ids=lambda words: words[0])
@pytest.mark.parametrize("name", FILES)
def test_file_that_is_no_configuration_is_one_message(name: str, command: tuple[str, ...], tmp_path: Path) -> None:
    content, expected = FILES[name]
    (tmp_path / name).write_text(content)
    found = hwopt(command[0], name, *command[1:], cwd=tmp_path)
    assert found.returncode == 2
    assert expected in found.stderr
    assert len(found.stderr.splitlines()) == 1
    assert not (tmp_path / "new").exists()


def test_import_writes_two_files_that_plan_and_overwrites_none(tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text(GOOD + "fp16: true\nunknown_key: 3\n")
    found = hwopt("import", "old.yaml", "-o", "new", "--card", "3070", "--set", "data.train=rows.csv", cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    assert "unknown_key = 3" in found.stdout
    assert "model.name: the file does not say it" in found.stdout
    assert 'train = "rows.csv"' in (tmp_path / "new" / "job.toml").read_text()
    assert hwopt("check", "new/profile.toml", "new/job.toml", cwd=tmp_path).returncode == 0
    before = (tmp_path / "new" / "profile.toml").read_text()
    again = hwopt("import", "old.yaml", "-o", "new", cwd=tmp_path)
    assert again.returncode == 2
    assert "overwrites no file" in again.stderr
    assert (tmp_path / "new" / "profile.toml").read_text() == before


def test_import_as_json_lists_every_key(tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text(GOOD + "unknown_key: 3\noutput_dir: out\n")
    found = json.loads(hwopt("import", "old.yaml", "-o", "new", "--format", "json", cwd=tmp_path).stdout)
    assert found["taken"] == {"plugins.batch.train": 32, "training.learning_rate": 3e-5, "training.seed": 42}
    assert {each["key"]: each["kind"] for each in found["left"]} == {"unknown_key": "no equivalent", "output_dir": "ignored"}
    assert found["placeholders"] == ["model.name", "data.train"]
