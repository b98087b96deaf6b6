"""Each rule: a file that breaks it, with the line and the fix, and one that does not."""

import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from transformers.trainer_utils import SaveStrategy, SchedulerType
from transformers.training_args import OptimizerNames

from hwopt.configs.check import Facts
from hwopt.configs.check.checker import CheckReport, Given, check, check_file, installed_rules
from hwopt.configs.check.rules.names import TRL_VALUES
from hwopt.configs.recognise import read_source, view_of
from hwopt.configs.words import VALUES
from hwopt.planning.inputs import Inputs

INPUTS = Inputs()
REPORTS = count()
"""Numbers of folders: `INPUTS` reads a file once, and old versions of pytest give a folder to several tests."""


class Case(NamedTuple):
    rule: str
    line: int
    """Of the finding in `broken`."""
    fix: str
    """A part of the fix."""
    broken: str
    fine: str
    suffix: str
    level: str
    given: dict[str, Any]


TABLE = (Path(__file__).parent / "rule_cases.txt").read_text(encoding="utf-8")
"""Three lines for a case: the rule | the line of the finding | a part of the fix | options of the case; a file that breaks the
rule; one that does not. " / " begins a new line of a file."""
TYPES = {"rows": int, "cores": int, "max_length": int, "parameters": float}


def read_cases() -> Iterator[Case]:
    lines = TABLE.strip("\n").splitlines()
    for head, *files in zip(lines[::3], lines[1::3], lines[2::3], strict=True):
        rule, line, fix, options = (*head.split(" | "), "", "")[:4]
        given = {key: TYPES.get(key, str)(value) for key, value in (pair.split("=") for pair in options.split())}
        broken, fine = (text.removeprefix("  ").replace(" / ", "\n") + "\n" for text in files)
        yield Case(rule, int(line), fix, broken, fine, given.pop("suffix", ".yaml"), given.pop("level", ""), given)


CASES = list(read_cases())
PASCAL = 'name = "pascal"\n[card]\nmatch = ["GTX 1080"]\nmemory_gib = 8\ncompute_capability = "6.1"\n'


def report_on(text: str, case: Case, folder: Path) -> CheckReport:
    folder = folder / str(next(REPORTS))
    folder.mkdir(parents=True)
    path = folder / f"config{case.suffix}"
    path.write_text(text, encoding="utf-8")
    (folder / "pascal.toml").write_text(PASCAL)
    given = {key: str(folder / "pascal.toml") if value == "PASCAL" else value for key, value in case.given.items()}
    return check_file(path, Given(**{"card": None if "profile" in given else "A100", **given}), INPUTS)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)
def test_rule_finds_the_mistake_at_its_line_with_the_fix_and_nothing_without_it(case: Case, tmp_path: Path) -> None:
    (found,) = [each for each in report_on(case.broken, case, tmp_path).findings if each.rule == case.rule]
    assert found.place.endswith(f"/config{case.suffix}:{case.line}")
    assert case.fix in found.fix
    assert found.level == (case.level or next(rule.level for rule in installed_rules() if rule.name == case.rule))
    assert found.what.endswith(".")
    assert found.why.endswith(".")
    assert case.rule not in {each.rule for each in report_on(case.fine, case, tmp_path / "fine").findings}


def test_every_rule_has_a_case() -> None:
    assert {case.rule for case in CASES} == {rule.name for rule in installed_rules()}


@pytest.mark.parametrize("name", INPUTS.files)
def test_builtin_profile_has_no_error_and_no_wrong_comment(name: str) -> None:
    report = check_file(INPUTS.files[name], Given(cores=8), INPUTS)
    assert report.count("error") == 0
    assert "comment-value" not in {each.rule for each in report.findings}
    view = view_of(read_source(INPUTS.files[name]), INPUTS)
    for rows, steps in re.findall(r"\b(\d+) ?[x×] ?(\d+)\b(?! ?(?:tokens|GB|GiB))", view.value("summary", "")):
        assert (int(rows), int(steps)) == (view.train_rows, view.number("gradient_accumulation_steps") or 1)
    summary, dtype = view.value("summary", ""), view.value("mixed_precision")
    for pattern, word in ((r"\bbatch (\d+)", "per_device_train_batch_size"), (r"\b(\d+) workers", "dataloader_num_workers")):
        assert all(int(number) == view.number(word) for number in re.findall(pattern, summary))
    said = re.findall(r"\b(?:fp16|bf16|fp32)\b", summary)
    assert not said or dtype not in ("fp16", "bf16", "fp32") or dtype in said


def test_card_rules_say_that_they_need_a_card(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("bf16: true\ntf32: true\ndataloader_num_workers: 4\n")
    report = check(view_of(read_source(path), INPUTS), Facts(), installed_rules())
    assert any("card-feature" in each and "--card" in each for each in report.waiting)
    assert any("workers-cores" in each and "--cores" in each for each in report.waiting)
    assert report.exit_code() == 0


def test_invalid_profile_is_a_report_with_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text('name = "p"\n[plugins.batch]\ntrian = 4\ntrain = "x"\n')
    report = check_file(path, Given(), INPUTS)
    assert report.exit_code() == 2
    assert {each.place for each in report.findings} == {f"{path}:3", f"{path}:4"}
    assert {each.key for each in report.findings} == {"plugins.batch.trian", "plugins.batch.train"}


def test_plugin_options_of_a_job_are_merged_with_the_profile_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    text = '[model]\nname = "m"\n[data]\ntrain = "t.csv"\nmax_length = 64\n[plugins.batch]\n'
    path.write_text(f"{text}eval = 100\n")
    (found,) = [each for each in check_file(path, Given(profile="t4_16gb"), INPUTS).findings if each.rule == "eval-batch"]
    assert found.place == f"{path}:7"
    assert "100, 6.25 times the training batch of 16" in found.what
    notes = [each for each in check_file(path, Given(profile="rtx3070_8gb"), INPUTS).findings if each.rule == "tf32-beside-half"]
    assert [each.what for each in notes] == ["plugins.tf32 beside plugins.precision.dtype."]  # it said dtype = true
    path.write_text(f"{text}evil = 100\n")
    report = check_file(path, Given(profile="t4_16gb"), Inputs())
    assert report.exit_code() == 2
    assert report.findings[0].place == f"{path}:7"
    assert "Did you mean 'eval'" in report.findings[0].what


def test_deepspeed_file_beside_the_arguments_is_read(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text("base_model: m\noptimizer: lion_8bit\ndeepspeed: ds.json\n")
    (tmp_path / "ds.json").write_text('{"optimizer": {"type": "AdamW"}}')
    (found,) = [each for each in check_file(path, Given(card="A100"), INPUTS).findings if each.rule == "deepspeed-twice"]
    assert found.what == "optimizer is lion_8bit, and the DeepSpeed configuration has optimizer.type = AdamW."
    assert found.why == "DeepSpeed's is taken; optimizer has no effect."

    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}')
    (found,) = [each for each in check_file(path, Given(card="A100"), INPUTS).findings if each.rule == "states-offload"]
    assert found.what == "lion_8bit, and the DeepSpeed configuration offloads the optimizer."


def test_optimizers_are_those_of_transformers() -> None:
    assert {each.value for each in OptimizerNames} <= VALUES["optim"]
    assert {each.value for each in SchedulerType} == VALUES["lr_scheduler_type"]
    assert {each.value for each in SaveStrategy} == VALUES["save_strategy"]


@pytest.mark.parametrize("name", TRL_VALUES)
def test_losses_are_those_of_trl(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    module = import_module(
        {"CPOConfig": "trl.experimental.cpo", "OnlineDPOConfig": "trl.experimental.online_dpo"}.get(name, "trl")
    )
    source = "".join(inspect.getsource(getattr(module, name.replace("Config", end))) for end in ("Config", "Trainer"))
    known = set(TRL_VALUES[name]["loss_type"].split())
    assert set(re.findall(r'loss_type == "(\w+)"', source)) <= known | {"kto_pair"}, "CPO refuses this one by its name"
    assert {each for each in known if f'"{each}"' not in source} <= {"aot_pair"}, "of older versions"
