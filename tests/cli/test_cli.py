"""The command line, called in this process; tests/integration/test_cli.py starts processes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tomlkit
from command_line import hwopt

from hwopt.cli import FORMER, run_command
from hwopt.cli.options import say
from hwopt.report.status_line import CLEAR_LINE
from hwopt.testing import TINY_BERT, write_samples


def write_job(folder: Path, extra: str = "", **training: object) -> Path:
    write_samples(folder / "train.jsonl", 40)
    write_samples(folder / "dev.jsonl", 12, seed=1)
    data = {"train": "train.jsonl", "eval": "dev.jsonl", "max_length": 32}
    settings = {"max_steps": 3, "logging_steps": 1} | training
    job = tomlkit.dumps({"model": {"config": TINY_BERT}, "data": data, "training": settings})
    (folder / "job.toml").write_text(job + extra)
    return folder / "job.toml"


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (["run", "--profile", "cpu", "--set", "plugins.optimiser.name=x"], 2, "Did you mean 'optimizer'"),
        (["run", "--profile", "cpu", "--set", "plugins.optimizer.name=adamw_trch"], 2, "Did you mean 'adamw_torch'"),
        (["plan", "--profile", "cpu", "--set", "plugins.nope.x=1"], 2, "--set: no plugin 'nope'"),
        (["plan", "--profile", "cpu", "--set", "model.config.hidden_size=33"], 2, "cannot build"),
        (["run", "--profile", "cpu", "--output-dir", "train.jsonl"], 2, "is a file"),
        (["run", "--profile", "cpu", "--set", "data.train=missing.csv"], 4, "missing.csv"),
        (["run", "--profile", "rtx3070_8gb", "--strict"], 3, "--strict: plugin 'tf32'"),
        (["plan", "--profile", "cpu", "--nodes", "2"], 2, "--nodes 2: one rank .* multiple of 2 as"),
        (["trian"], 2, "Did you mean"),
        (["profiles", "show", "auto"], 2, "`hwopt plan --profile auto` names the one of this machine"),
        (["profiles", "show", "cpu_tuned.toml"], 2, "no profile 'cpu_tuned.toml' is installed"),
        (["run", "--learning-rate", "1"], 2, "Give --set training.learning_rate=VALUE"),
        (["run", "--per_device_train_batch_size", "4"], 2, "Give --set plugins.batch.train=VALUE"),
        (["run", "--set", "learning_rate=1"], 2, "'--set': learning_rate: .* Give --set training.learning_rate=VALUE"),
        (["run", "--set", "batch.train=4"], 2, "no table 'batch'. If it is a plugin: plugins.batch.train. It is one of"),
        (["run", "jb.toml"], 2, "jb.toml: no such job file. Did you mean 'job.toml'"),
        (["run", "--lr", "fast"], 2, "training.learning_rate: input should be a valid number"),
        (["run", "train.csv"], 2, "train.csv: is not a job, .* hwopt init train.csv"),
        (["run", "--profile", "cpu", "--set", "data.label=colr"], 4, "no column 'colr'.*Set data.label to one .* by --set"),
        (["bench", "--profile", "nope"], 2, "--profile 'nope': no such profile"),
        (["bench", "--profile", "cpu", "--against", "nope"], 2, "--against 'nope': no such profile"),
        (["bench", "--profile", "cpu", "--against", "cpu"], 2, "--against cpu: this is the profile itself. Give another one"),
        (["bench", "--profile", "cpu", "--set", "data.train=missing.csv"], 4, "missing.csv"),
        (["bench", "--profile", "none.toml"], 2, "equal plans on this machine: there is nothing to compare"),
        (["bench", "--profile", "cpu", "--memory-limit", "8GiB"], 2, "this machine has no CUDA device"),
        (["bench", "--profile", "cpu", "-o", "no-folder/page.html"], 6, "-o no-folder/page.html: there is no folder"),
        (["tune", "--profile", "rtx3070-8gb"], 2, "Did you mean 'rtx3070_8gb'"),
        (["bench", "--profile", "cpu", "-o", "job.toml"], 2, "-o job.toml: is a file that the command reads"),
        (["tune", "--profile", "cpu", "-o", "job.toml", "--force"], 2, "job.toml: is a file that the command reads"),
        (["tune", "--profile", "cpu", "-o", "no-folder/mine.toml"], 6, "there is no folder 'no-folder'"),
        (["tune", "--profile", "cpu", "--set", "data.train=missing.csv"], 4, "missing.csv"),
    ],
)
def test_bad_input_is_one_message(arguments: list[str], code: int, expected: str, tmp_path: Path) -> None:
    write_job(tmp_path)
    (tmp_path / "train.csv").write_bytes("text;label\nschön;gut\n".encode("cp1252"))
    (tmp_path / "none.toml").write_text('name = "none"\n[plugins.tf32]\n')
    before = sorted(tmp_path.rglob("*"))
    done = hwopt(*arguments, cwd=tmp_path)
    assert done.returncode == code, (done.stdout, done.stderr)
    assert re.search(expected, done.stderr), done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) <= 14
    assert sorted(tmp_path.rglob("*")) == before, "nothing half-written"


def test_plan_says_that_a_run_would_refuse_the_data(tmp_path: Path) -> None:
    write_job(tmp_path)
    with open(tmp_path / "train.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps({"text": "red " * 5000, "label": "colour"}) + "\n")
    job = (tmp_path / "job.toml").read_text(encoding="utf-8")
    (tmp_path / "job.toml").write_text(job.replace("max_length = 32", ""), encoding="utf-8")
    done = hwopt("plan", "--profile", "cpu", "--format", "json", cwd=tmp_path)
    assert done.returncode == 4
    assert json.loads(done.stdout)["refused"] in done.stderr
    assert re.search(r"train.jsonl:41: has 5,00\d tokens, more than the model's limit", done.stderr)
    for code, setting in (
        (4, "data.max_bad_rows=0"),
        (4, "data.train=nowhere.jsonl"),
        (4, "data.test=nowhere-*.jsonl"),
        (2, "model.tokenizer=./nowhere"),
        (2, "training.metric_for_best_model=bleu"),
    ):
        more = [] if code == 4 else ["--set", "data.max_length=32"]
        done = hwopt("plan", "--profile", "cpu", "--set", setting, *more, cwd=tmp_path)
        assert (done.returncode, done.stdout.partition(":")[0]) == (code, "WILL NOT RUN"), setting
    elsewhere = "--profile t4_16gb --hardware profile --set data.train=nowhere.jsonl --set data.max_length=32"
    assert hwopt("plan", *elsewhere.split(), cwd=tmp_path).returncode == 0


def test_paths_of_a_job_start_at_its_folder_then_at_the_working_directory(tmp_path: Path) -> None:
    jobs = tmp_path / "jobs"
    jobs.mkdir()
    write_job(jobs)
    (jobs / "dev.jsonl").rename(tmp_path / "dev.jsonl")
    done = hwopt("plan", "jobs/job.toml", "--profile", "cpu", "--format", "json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)["job"]["data"]
    assert (data["train"], data["eval"]) == (str(Path("jobs", "train.jsonl")), "dev.jsonl")
    (jobs / "train.jsonl").unlink()
    done = hwopt("run", "jobs/job.toml", "--profile", "cpu", cwd=tmp_path)
    assert done.returncode == 4
    assert "Searched: the folder of the job's file 'jobs', the working directory" in done.stderr


def test_shortcuts_set_keys_of_job_and_profile(tmp_path: Path) -> None:
    write_job(tmp_path)
    shortcuts = ("--lr", "3e-4", "--epochs", "2", "--max-steps", "7", "--batch", "32")
    done = hwopt("plan", "--profile", "cpu", *shortcuts, "--format", "json", cwd=tmp_path)
    plan = json.loads(done.stdout)
    found = [plan["training"][key] for key in ("learning_rate", "num_train_epochs", "max_steps")]
    assert (found, plan["batch"]["step"], plan["batch"]["train"]) == ([3e-4, 2.0, 7], 32, 16)


def test_list_and_show_commands_print_profiles_and_plugins(tmp_path: Path) -> None:
    profiles = json.loads(hwopt("profiles", "list", "--format", "json", cwd=tmp_path).stdout)
    names = {row["name"] for row in profiles}
    assert {"rtx3070_8gb", "cpu"} <= names
    plugins = json.loads(hwopt("plugins", "list", "--format", "json", cwd=tmp_path).stdout)
    assert all(row["distribution"].startswith("hwopt") for row in plugins if row["name"] in ("length_batching", "tf32"))
    shown = hwopt("plugins", "show", "optimizer", cwd=tmp_path).stdout
    for word in ("stage", "writes", "optimizer", "adamw_bnb_8bit", "fallback", "hwopt"):
        assert word in shown
    assert "rtx3070_8gb.toml:" in hwopt("profiles", "show", "rtx3070_8gb_batch16", cwd=tmp_path).stdout


@pytest.mark.integration
@pytest.mark.parametrize(
    ("variables", "shown"),
    [
        ({"_HWOPT_COMPLETE": "bash_source"}, "complete -o nosort -F _hwopt_completion hwopt"),
        ({"_HWOPT_COMPLETE": "bash_complete", "COMP_WORDS": "hwopt check --schema j", "COMP_CWORD": "3"}, "plain,job"),
        ({"_HWOPT_COMPLETE": "bash_complete", "COMP_WORDS": "hwopt pl", "COMP_CWORD": "1"}, "plain,plan\nplain,plugins"),
    ],
)
def test_shell_completion_ends_without_an_error(variables: dict[str, str], shown: str) -> None:
    found = subprocess.run([sys.executable, "-m", "hwopt"], env=os.environ | variables, capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (0, "")
    assert shown in found.stdout


def test_unwritable_cache_ends_run_with_6_and_plan_with_0(tmp_path: Path) -> None:
    write_job(tmp_path)
    (tmp_path / "file").write_text("")
    assert hwopt("plan", "--profile", "cpu", cwd=tmp_path, HWOPT_CACHE=str(tmp_path / "file")).returncode == 0
    done = hwopt("run", "--profile", "cpu", cwd=tmp_path, HWOPT_CACHE=str(tmp_path / "file"))
    assert done.returncode == 6, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("former", FORMER)
def test_former_command_names_its_successor(former: str, tmp_path: Path) -> None:
    found = hwopt(former, "x", cwd=tmp_path)
    assert found.returncode == 2
    assert f"No such command '{former}'. Type: hwopt {FORMER[former]}" in found.stderr


def test_no_arguments_print_the_whole_help(tmp_path: Path) -> None:
    alone, asked = hwopt(cwd=tmp_path), hwopt("--help", cwd=tmp_path)
    assert alone.returncode == 2
    assert alone.stderr.strip() == asked.stdout.strip()


def test_rows_break_between_words_on_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = "batch  rows of a micro-batch, of an evaluation batch and of an optimizer step"
    say(row, indent=" " * 7)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "62")
    say(row, indent=" " * 7)
    first, *broken = capsys.readouterr().out.splitlines()
    assert first == row
    assert broken == [row[:62], " " * 7 + row[63:]]


def test_errors_break_between_words_on_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = (["plugins", "show", "optimzer"], ["export", "--to", "acelerate"], ["compare", "t4_16", "t4_16gb"])
    whole = [(run_command(command), capsys.readouterr().err)[1] for command in commands]
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    for command, message in zip(commands, whole, strict=True):
        run_command(command)
        broken = capsys.readouterr().err.replace(CLEAR_LINE, "\n")
        assert max(map(len, broken.splitlines())) <= 60
        assert message.split("rror: ")[1].split() == broken.split("rror: ")[1].split()
