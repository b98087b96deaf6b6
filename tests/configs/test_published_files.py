"""The configurations of the seeds and three public ones: checked, imported and planned; compared with golden files.

`HWOPT_UPDATE_GOLDEN=1 pytest tests/configs/test_published_files.py` rewrites the files; read the difference before you commit.
"""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from golden_files import check_golden
from published_configs import PUBLISHED

from hwopt import api
from hwopt.config.toml_text import inline
from hwopt.configs.check.checker import Given, check_file
from hwopt.configs.imported_files import Imported, import_file, write_imported
from hwopt.configs.recognise import read_source
from hwopt.planning.inputs import Inputs
from hwopt.report.check import show_left, show_reports
from hwopt.report.terminal import Terminal

CONFIGS = Path(__file__).parent / "published"
GOLDEN = Path(__file__).parents[1] / "golden" / "import"
CARDS = {"seed000": "rtx3070", "seed001": "rtx3070", "seed002": "rtx3070", "seed003": "rtx3090", "seed004": "t4"}
"""File -> its card, a profile in the folder of the configurations: the figures of the built-in profiles may change."""
MODELS = {"axolotl_qlora": "Llama-3.2-1B", "llama_factory_lora": "Llama-3.2-1B"}
"""File -> the published model whose architecture stands for the model that it names, which is on the hub."""
GROUPS = (*CARDS, "axolotl_qlora", "llama_factory_lora", "accelerate_zero3", "deepspeed_zero2")
FILES = sorted(path for path in CONFIGS.iterdir() if path.suffix in (".yaml", ".json"))


def card_of(name: str) -> Path:
    return CONFIGS / f"card_{CARDS.get(name.split('-')[0], 'a100')}.toml"


def given(name: str) -> Given:
    known = Given(profile=str(card_of(name)), cores=8, rows=20_000)
    if name in MODELS:
        return replace(known, parameters=PUBLISHED[MODELS[name]].parameters)
    return replace(known, parameters=109.5e6, max_length=192)


def imported_from(path: Path) -> Imported:
    profile = Inputs().profile(str(card_of(path.stem)))
    return import_file(path, Inputs(), card=(profile.name, profile.card))


def golden_text(name: str) -> str:
    """Findings, import and both files of the configurations whose names begin with `name`."""
    stream = io.StringIO()
    console = Terminal(file=stream)
    for path in (path for path in FILES if path.stem.startswith(name)):
        show_reports(console, [check_file(path, given(name))])
        files = imported_from(path)
        show_left(console, files.summary(Path("DIR")))
        stream.write(f"\n--- DIR/profile.toml\n{files.profile}\n--- DIR/job.toml\n{files.job}\n{'=' * 100}\n")
    return stream.getvalue().replace(f"{CONFIGS}/", "")


@pytest.mark.parametrize("name", GROUPS)
def test_findings_and_imported_files_match_the_golden_file(name: str) -> None:
    check_golden(GOLDEN / f"{name}.txt", golden_text(name))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_imported_files_pass_check_and_plan(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files = imported_from(path)
    write_imported(files, tmp_path / "new")
    job, profile = tmp_path / "new" / "job.toml", tmp_path / "new" / "profile.toml"
    for written in (job, profile):
        report = check_file(written, given(path.stem))
        assert report.count("error") == 0, report.findings
    assignments = []
    if path.stem in MODELS:
        config = {key: value for key, value in PUBLISHED[MODELS[path.stem]].config.items() if value is not None}
        assignments = [f"model.config={inline(config).as_string()}"]
    plan = api.resolve(str(profile), job, assignments=assignments, hardware="profile")
    taken = {key[1] for key in files.translation.tables("profile")}
    assert taken == {entry.name for entry in plan.entries}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_import_drops_no_key_and_no_comment(path: Path) -> None:
    files = imported_from(path)
    taken = {each.setting.key for each in files.translation.taken}
    left = {each.key for each in files.translation.left}
    source = read_source(path)
    for key in {entry.key for entry in (*source.entries, *source.replaced)}:
        assert any(each == key or each.startswith(f"{key}.") for each in taken | left), key
    texts = files.profile + files.job
    for line in path.read_text(encoding="utf-8").splitlines():
        comment = line.partition(" # ")[2] if path.suffix == ".yaml" and not line.startswith("#") else line.strip("#= ")
        if "#" in line and comment.strip("= -"):
            assert comment.strip(" =#") in texts, line
