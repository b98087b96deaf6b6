"""Every fenced block and inline command of README.md, CONTRIBUTING.md and docs/*.md works.

The fast tests check that every command has options that exist. As integration tests, `hwopt` commands run in this process in a
folder with a tiny job; those that start launchers run as soak tests. Of other programs only pip is checked: its extras exist.
"""

import configparser
import importlib.metadata
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import pytest
from cli.test_cli import hwopt
from documentation import LANGUAGES, PAGES, ROOT, Block, Command, Page, read_page, read_pages
from documented_folder import BEFORE, arguments, folder_of, launches, write_files_of, write_folder

from hwopt import api
from hwopt.cli import COMMANDS, command_called
from hwopt.planning.inputs import Inputs, refuse_mistakes
from hwopt.system.atomic_folder import write_json
from hwopt.testing import finished

NOT_RUN = {
    "accelerate launch --config_file F --machine_rank 1 --main_process_ip 10.0.0.1 -m hwopt run '…'": "needs two machines",
    "accelerate launch --config_file two_zero.yaml -m hwopt run job.toml --profile t4_16gb_zero": (
        "compiles DeepSpeed's operators; tests/integration/test_ranks.py launches two ranks with ZeRO"
    ),
    "hwopt run --processes N": "names the option; README.md has a whole command",
    "hwopt run '…' --report-to tensorboard,wandb": "wandb needs an account; tests/report/test_trackers.py",
    "hwopt bench job.toml --profile rtx3070_8gb": "takes minutes; tests/integration/test_bench.py measures a tiny job",
    "hwopt bench job.toml --profile rtx3070_8gb --against t4_16gb -o bench.html": "as tests/integration/test_bench.py",
    "hwopt bench --profile cpu --seconds 5 --rounds 9": "tests/integration/test_bench.py measures a tiny job",
    "hwopt bench --profile cpu --rounds 3": "tests/integration/test_bench.py measures a tiny job",
    "hwopt tune --profile cpu": "takes minutes; tests/integration/test_tune.py tunes a tiny job",
    "hwopt plugins show sign_momentum": "needs the package of docs/plugins.md, see tests/integration/test_documented_plugins.py",
}
"""Commands of hwopt and Accelerate that the tests do not run -> why."""
ELSEWHERE = {
    "docs/plugins.md": "tests/integration/test_documented_plugins.py",
    "docs/your-script.md": "tests/hosts/test_documented_script.py",
}
"""Page -> the test that runs its Python blocks as one package."""
OUTPUTS_COMPARED = {"docs/questions.md": "tests/integration/test_questions.py"}
"""Page -> the test that runs its commands and compares their output."""
SCRIPTS_NOT_RUN = {"from peft import PeftModel": "needs weights of the Hub"}
"""First line of a script that the tests compile only -> why."""
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def documented(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("documented") / "folder"
    write_folder(folder)
    return folder


def check_pip(words: tuple[str, ...]) -> None:
    """Extras are declared."""
    for extras in re.findall(r"\[([\w,]+)\]", " ".join(words)):
        assert set(extras.split(",")) <= set(PROJECT["project"]["optional-dependencies"]), extras


def check_options(text: str) -> None:
    """The `hwopt` commands in `text` have options that exist. A command ends with a quote or the line."""
    for line in re.findall(rf"\bhwopt ((?:{'|'.join(COMMANDS)})\b[^\"\n]*)", text):
        check_words(line.split())


def check_words(words: Sequence[str]) -> None:
    """A command and its options exist."""
    name, *options = words[: words.index(">")] if ">" in words else words
    with suppress(click.exceptions.Exit):  # of an eager option, as --schema
        command_called(name).make_context(name, [word for word in options if word != "…"])


def is_run(command: Command) -> bool:
    """Whether a test runs a command."""
    return command.words[0] in ("accelerate", "hwopt", "ls") and command.text not in NOT_RUN and not only_names(command)


def is_run_here(command: Command) -> bool:
    """Whether a test of this file runs a command."""
    return is_run(command) and not launches(command) and command.page not in OUTPUTS_COMPARED


def only_names(command: Command) -> bool:
    """Whether a command is `hwopt NAME` of a command that needs arguments to be useful."""
    return len(command.words) == 2 and command.words[1] in (
        *("bench", "check", "compare", "evaluate", "export", "import", "init"),
        *("plan", "predict", "report", "run", "tune"),
    )


def test_every_block_is_of_a_known_kind() -> None:
    pages = read_pages()
    unknown = [block.place for page in pages for block in page.blocks if block.kind == "unknown"]
    assert not unknown, f"mark output as ```text, or as ```console with `$ command` first; other languages: {LANGUAGES}"
    assert sum(is_run(command) for page in pages for command in page.commands) >= 75


def test_every_reason_for_not_running_a_command_holds() -> None:
    commands = [command for page in read_pages() for command in page.commands]
    assert set(NOT_RUN) <= {command.text for command in commands}
    elsewhere = ELSEWHERE | OUTPUTS_COMPARED
    assert all((ROOT / page).is_file() and (ROOT / test).is_file() for page, test in elsewhere.items())
    assert all((ROOT / test).is_file() for why in NOT_RUN.values() for test in re.findall(r"tests/\S+\.py", why))
    run = {command.words[1] for command in commands if command.words[0] == "hwopt" and is_run(command)}
    run |= {text.split()[1] for text, why in NOT_RUN.items() if "tests/" in why}
    named = {command.words[1] for command in commands if only_names(command)}
    assert named <= run, "a page names the command, and no page has one with its arguments"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_extras_and_options_of_commands_exist(path: Path) -> None:
    for command in read_page(path).commands:
        if command.words[0] == "pip":
            check_pip(command.words)
        elif only_names(command):
            assert command.words[1] in COMMANDS
        elif command.words[0] in ("hwopt", "accelerate") and "--help" not in command.words:
            words = [word for word in command.words[command.words.index("hwopt") + 1 :] if word != "--debug"]
            check_words(words) if words != ["…"] else None


RUN = [path for path in PAGES if any(map(is_run_here, read_page(path).commands))]


@pytest.mark.integration
@pytest.mark.parametrize("path", RUN, ids=lambda path: path.name)
def test_commands_and_scripts_of_a_page_run_in_order(
    path: Path, documented: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, folder = read_page(path), tmp_path / "folder"
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is asked in the terminal?\n"))
    shutil.copytree(documented, folder)
    write_files_of(page, folder)
    before = [Command(page.name, 0, tuple(text.split())) for text in BEFORE.get(page.name, [])]
    for command in before + page.commands:
        if command.words[0] == "ls":
            done = subprocess.run(" ".join(command.words), shell=True, cwd=ROOT, capture_output=True, text=True)
            assert (done.returncode, done.stderr) == (0, "")
        elif is_run_here(command):
            done = hwopt(*arguments(command)[1:], cwd=folder_of(command, folder))
            assert done.returncode == 0, f"{command.place}\n{done.stdout[-2000:]}{done.stderr[-3000:]}"
            assert done.stdout + done.stderr, command.place
    run_scripts(page, folder)


COMMANDS_OF_PAGES = [command for page in read_pages() for command in page.commands if is_run(command)]


@pytest.mark.integration
@pytest.mark.soak  # tests/integration/test_launch.py launches two processes
@pytest.mark.parametrize("launch", [*filter(launches, COMMANDS_OF_PAGES)], ids=lambda command: command.text)
def test_documented_launch_trains(launch: Command, documented: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(documented, tmp_path / "folder")
    for command in COMMANDS_OF_PAGES:
        if "two.yaml" in launch.words and command.text.endswith("-o two.yaml"):
            assert hwopt(*arguments(command)[1:], cwd=folder).returncode == 0
    program, *words = arguments(launch)
    module = {"hwopt": "hwopt", "accelerate": "accelerate.commands.accelerate_cli"}[program]
    done = finished([sys.executable, "-m", module, *words], folder)
    assert done.returncode == 0, f"{launch.place}\n{done.stdout[-2000:]}{done.stderr[-3000:]}"
    assert "summary" in done.stdout


def run_scripts(page: Page, folder: Path) -> None:
    """Run the Python blocks of a page in one namespace, in the folder in which its commands ran."""
    scope: dict[str, Any] = {"__name__": "documented"}
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        for block in page.blocks:
            if block.kind == "python" and page.name not in ELSEWHERE and block.text.splitlines()[0] not in SCRIPTS_NOT_RUN:
                exec(compile(block.text, block.place, "exec"), scope)


def blocks_of(kind: str) -> list[Any]:
    return [pytest.param(block, id=block.place) for page in read_pages() for block in page.blocks if block.kind == kind]


@pytest.mark.parametrize("block", blocks_of("python"))
def test_python_blocks_compile(block: Block) -> None:
    compile(block.text, block.place, "exec")
    commands = {read_page(ROOT / block.page).name for command in read_page(ROOT / block.page).commands if is_run_here(command)}
    assert block.page in ELSEWHERE or commands, "the test of the page's commands runs the script"


@pytest.mark.parametrize("block", [*blocks_of("script"), *blocks_of("unit")])
def test_scripts_and_units_parse_and_their_commands_have_known_options(block: Block) -> None:
    text = block.text.replace("\\\n", "")
    if block.kind == "script":
        done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
    else:
        configparser.ConfigParser(interpolation=None).read_string(text)
    assert re.search(r"\bhwopt run ", text)
    check_options(text)


@pytest.mark.parametrize("block", [parameter for parameter in blocks_of("script") if "SBATCH" in parameter.values[0].text])
@pytest.mark.parametrize(("code", "requeued"), [(0, False), (143, True), (7, False)])
def test_slurm_script_requeues_an_interrupted_run_and_keeps_the_exit_code(
    block: Block, code: int, requeued: bool, tmp_path: Path
) -> None:
    launched = "accelerate launch" in block.text
    ending = 1 if launched and code else code  # the launcher loses the code
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    write_json(tmp_path / "runs" / "mine" / "status.json", {"exit_code": code, "message": ""})
    commands = {"srun": f"exit {ending}", "scontrol": '[ "$1" = requeue ] && echo "requeued $2" || echo node1'}
    for name, text in commands.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    variables = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "node1"}
    done = subprocess.run(["bash"], input=block.text, env=variables, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (ending, "")
    assert done.stdout == ("requeued 12\n" if requeued else "")


def test_json_blocks_are_json() -> None:
    for page in read_pages():
        for block in page.blocks:
            if block.kind == "json":
                json.loads(block.text)


@pytest.mark.parametrize("block", blocks_of("toml"))
def test_toml_blocks_are_a_job_a_profile_or_entry_points(
    block: Block, documented: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(documented)
    tables = tomllib.loads(block.text)
    if "project" in tables:
        declared = {entry.group for entry in importlib.metadata.distribution("hwopt").entry_points}
        assert set(tables["project"]["entry-points"]) <= declared
    elif "model" in tables or ("plugins" not in tables and "name" not in tables):
        needed = {"model": 'name = "a-model"', "data": 'train = "train.csv"'}
        missing = "".join(f"\n[{name}]\n{line}\n" for name, line in needed.items() if name not in tables)
        (tmp_path / "job.toml").write_text(block.text + missing, encoding="utf-8")
        refuse_mistakes(Inputs(), ["cpu"], tmp_path / "job.toml", [], None)
    else:
        header = "" if "name" in tables else 'name = "documented"\n'
        (tmp_path / "documented.toml").write_text(header + block.text, encoding="utf-8")
        unclipped = ["training.max_grad_norm=0"]  # an update in the backward pass has no norm of all gradients
        plan = api.resolve(str(tmp_path / "documented.toml"), "job.toml", assignments=unclipped, inputs=Inputs())
        enabled = {name for name, table in tables["plugins"].items() if table.get("enabled", True)}
        assert enabled <= {entry.name for entry in plan.entries}
