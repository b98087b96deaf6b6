"""The profile that `hwopt tune` writes: it loads, extends its parent, and `hwopt check` finds nothing new in it."""

from pathlib import Path
from typing import Any

import pytest

from hwopt import api
from hwopt.config.profile import Profile
from hwopt.configs.check.checker import Given, check_file
from hwopt.errors import InputError
from hwopt.hardware.device import Hardware
from hwopt.planning.auto_profile import choose
from hwopt.planning.inputs import Inputs
from hwopt.trials.tuned_profile import Parent, Tuned, job_assignments, output_file, tuned_profile_text

INPUTS = Inputs()
TABLES: dict[str, dict[str, Any]] = {
    "batch": {"train": 32, "gradient_accumulation_steps": 4},
    "dataloader": {"num_workers": 2, "prefetch_factor": 4},
    "compile": {"enabled": True, "scope": "block"},
}
HEADER = [
    "rtx3070_8gb, tuned by hwopt 1.0 on 2026-11-22 on NVIDIA GeForce RTX 3070, with torch 2.13.0.",
    "Job: job.toml, BertForSequenceClassification, 128 rows per optimizer step, as before.",
    "  2  1.12 (1.10 to 1.14)  5.20 GiB  batch.train = 32",
]


def tuned(**tables: dict[str, Any]) -> Tuned:
    return Tuned(
        tables or TABLES, dict.fromkeys(tables or TABLES, "trial 2: 1.12 (1.10 to 1.14) times the speed of the start"), HEADER
    )


def written(path: Path, parent: Parent, found: Tuned, assignments: tuple[str, ...] = ()) -> Profile:
    path.write_text(tuned_profile_text(path, parent, found, assignments), encoding="utf-8")
    return Inputs().profile(str(path))


def installed(name: str) -> Parent:
    return Parent.of(name, INPUTS.profile(name), INPUTS.files)


def test_profile_extends_its_parent_with_the_best_setting(tmp_path: Path) -> None:
    path = tmp_path / "rtx3070_8gb_tuned.toml"
    profile = written(path, installed("rtx3070_8gb"), tuned())
    assert profile.name == "rtx3070_8gb_tuned"
    assert profile.content.extends == "rtx3070_8gb"
    assert profile.content.plugins["batch"] == {"train": 32, "eval": 128, "gradient_accumulation_steps": 4}
    assert profile.content.plugins["dataloader"]["num_workers"] == 2
    assert profile.content.plugins["optimizer"]["name"] == "adamw_bnb_8bit"
    text = path.read_text(encoding="utf-8")
    assert all(f"# {line}" in text for line in HEADER)
    assert text.count("# trial 2: 1.12 (1.10 to 1.14) times the speed of the start") == 3


def test_written_profile_plans_with_the_rows_of_its_parent(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    for rows in (43, 64):
        table = {"train": rows} | ({"gradient_accumulation_steps": 128 // rows} if 128 % rows == 0 else {})
        written(path, installed("rtx3070_8gb"), tuned(batch=table))
        plan = api.resolve(str(path), assignments=(), hardware="profile")
        assert (plan.batch.train, plan.batch.step) == (rows, 128)


@pytest.mark.parametrize("name", ["rtx3070_8gb", "cpu"])
def test_check_finds_nothing_in_the_written_profile_that_its_parent_has_not(name: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    rows = api.resolve(name, hardware="profile").batch.step
    found = tuned(batch={"train": rows}, dataloader={"num_workers": 1})
    written(path, installed(name), found)
    before = {each.rule for each in check_file(INPUTS.files[name], Given()).findings}
    report = check_file(path, Given())
    assert {each.rule for each in report.findings} <= before
    assert report.format == "hwopt profile"


def test_profile_beside_a_parent_that_is_a_file(tmp_path: Path) -> None:
    parent = tmp_path / "my_card.toml"
    parent.write_text('name = "my_card"\n[plugins.batch]\ntrain = 8\neffective = 24\n', encoding="utf-8")
    found = Parent.of(str(parent), INPUTS.profile(str(parent)), INPUTS.files)
    profile = written(tmp_path / "tuned.toml", found, tuned(batch={"train": 12, "gradient_accumulation_steps": 2}))
    assert profile.content.extends == "my_card"
    plugins = profile.content.plugins["batch"]
    assert (plugins["train"], plugins["gradient_accumulation_steps"]) == (12, 2)
    assert "effective" not in plugins


def test_profile_of_a_derived_parent_has_all_its_tables(tmp_path: Path) -> None:
    hardware = Hardware("cuda", "a card without a profile", 7.66, 7.66, compute_capability=(8, 6), cpu_cores=8)
    derived = choose(hardware, INPUTS).profile
    parent = Parent.of("auto", derived, INPUTS.files)
    assert parent.name is None
    profile = written(tmp_path / "mine.toml", parent, tuned())
    assert profile.content.extends is None
    assert profile.card == derived.card
    assert profile.content.training == derived.content.training
    assert profile.content.plugins.keys() == derived.content.plugins.keys() | {"compile"}
    assert profile.content.plugins["batch"]["train"] == 32
    assert profile.content.plugins["optimizer"] == derived.content.plugins["optimizer"]


def test_plugin_options_of_the_command_line_are_written_too(tmp_path: Path) -> None:
    given = ("plugins.optimizer.name=adamw_torch", "training.learning_rate=1e-4", "plugins.batch.effective=64")
    profile = written(
        tmp_path / "mine.toml", installed("cpu"), tuned(batch={"train": 32, "gradient_accumulation_steps": 2}), given
    )
    assert profile.content.plugins["optimizer"]["name"] == "adamw_torch"
    assert profile.content.plugins["batch"]["gradient_accumulation_steps"] == 2
    assert "effective" not in profile.content.plugins["batch"]
    assert job_assignments(given) == ["training.learning_rate=1e-4"]


def test_default_file_is_new_and_beside_the_job_or_a_parent_that_is_a_file(tmp_path: Path) -> None:
    folder = tmp_path / "cards"
    folder.mkdir()
    (folder / "mine.toml").write_text('name = "mine"\n', encoding="utf-8")
    parent = Parent.of(str(folder / "mine.toml"), INPUTS.profile(str(folder / "mine.toml")), INPUTS.files)
    assert output_file(None, installed("cpu"), None, force=False) == Path("cpu_tuned.toml")
    assert output_file(None, installed("cpu"), tmp_path / "job.toml", force=False) == tmp_path / "cpu_tuned.toml"
    (folder / "mine_tuned.toml").touch()
    assert output_file(None, parent, tmp_path / "job.toml", force=False) == folder / "mine_tuned-2.toml"
    with pytest.raises(InputError, match="needs both files in one folder"):
        output_file(tmp_path / "x.toml", parent, None, force=False)
    with pytest.raises(InputError, match=r"a profile ends with \.toml: mine\.toml"):
        output_file(tmp_path / "mine", installed("cpu"), None, force=False)
    with pytest.raises(InputError, match="is a file that the command reads"):
        output_file(folder / "mine.toml", parent, None, force=True)
