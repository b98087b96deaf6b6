"""The command line, called in this process."""

import io
import subprocess
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from hwopt.cli import run_command


def hwopt(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in this process, in the folder `cwd`. Returns its exit code and output."""
    output, message = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patched, redirect_stdout(output), redirect_stderr(message):
        patched.chdir(cwd)
        for name, value in {"COLUMNS": "200", **environment}.items():
            patched.setenv(name, value)
        code = run_command(list(arguments))
    return subprocess.CompletedProcess(arguments, code, output.getvalue(), message.getvalue())
