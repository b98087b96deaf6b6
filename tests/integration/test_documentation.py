"""The documented commands that start launchers, in a folder with a tiny job; tests/test_documentation.py runs the others."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from documentation import Command, read_pages
from documented_folder import arguments, write_folder
from test_documentation import is_launched

from hwopt.testing import finished

COMMANDS = [command for page in read_pages() for command in page.commands]


def started(command: Command, folder: Path) -> str:
    """What a command printed, which must end with exit code 0."""
    program, *words = arguments(command)
    module = {"hwopt": "hwopt", "accelerate": "accelerate.commands.accelerate_cli"}[program]
    done = finished([sys.executable, "-m", module, *words], folder)
    assert done.returncode == 0, f"{command.place}\n{done.stdout[-2000:]}{done.stderr[-3000:]}"
    return done.stdout


LAUNCHES = [
    ("", "hwopt run job.toml --profile rtx3090_24gb --processes 2"),
    ("", "accelerate launch -m hwopt run job.toml --profile rtx3090_24gb"),
    ("", "hwopt run --processes auto '…'"),
    ("--output two.yaml", "accelerate launch --config_file two.yaml -m hwopt run job.toml --profile PROFILE"),
]
"""(how the export before it ends, launch)."""


def test_every_documented_launch_is_listed() -> None:
    assert {launch for _, launch in LAUNCHES} == {command.text for command in COMMANDS if is_launched(command)}


@pytest.mark.soak  # tests/integration/test_launch.py launches two processes
@pytest.mark.parametrize(("export", "launch"), LAUNCHES, ids=["processes", "launcher", "all devices", "config-file"])
def test_documented_launch_trains(export: str, launch: str, tmp_path: Path) -> None:
    write_folder(tmp_path / "folder")
    for command in [command for command in COMMANDS if export and command.text.endswith(export)]:
        started(command, tmp_path / "folder")
    (command,) = [command for command in COMMANDS if command.text == launch]
    assert "summary" in started(command, tmp_path / "folder")
