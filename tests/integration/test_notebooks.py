"""The notebooks of examples/ run in a Jupyter kernel, except for the cell that installs hwopt. Every command exits with 0."""

import os
import re
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = ["colab", "kaggle"]
STEPS = ["doctor", "init", "plan", "run", "evaluate", "predict"]
CHECK = "assert _exit_code == 0, _exit_code  # added by the test"


def read(name: str) -> Any:
    notebook = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    return notebook


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def install_cell(notebook: Any) -> Any:
    (found,) = [cell for cell in code_cells(notebook) if "pip install" in cell.source]
    return found


def python_of(cell: Any, address: str) -> str:
    """The lines of a cell that are Python, with another address of the repository."""
    source = cell.source.replace("https://github.com/OWNER/hwopt", address)
    return "\n".join(line for line in source.splitlines() if line[:1] not in "!%")


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.rglob("*.ipynb")))
def test_notebook_installs_the_clone_and_has_all_steps_and_no_output(name: str) -> None:
    assert name in NAMES
    cells, cell = code_cells(read(name)), install_cell(read(name))
    assert cell.source.startswith('REPOSITORY = "https://github.com/OWNER/hwopt"  # replace this address\n')
    with pytest.raises(ValueError, match="Replace OWNER in the first line of this cell, then run the cell again"):
        exec(python_of(cell, "https://github.com/OWNER/hwopt"))
    exec(python_of(cell, "https://example.org/hwopt"))
    first = min(cell.source.index(mark) for mark in ("\n!", "\n%"))
    assert cell.source.index("raise ValueError") < first, "the check comes before the clone"
    assert re.search(r"^!git clone .* hwopt\n%pip install --quiet \./hwopt$", cell.source, re.MULTILINE)
    assert "torch" not in cell.source, "the torch of the service stays"
    assert not any(each.outputs or each.execution_count for each in cells)
    assert re.findall(r"^!hwopt (\w+)", "\n".join(each.source for each in cells), re.MULTILINE) == STEPS


@pytest.mark.daily
@pytest.mark.parametrize("name", [NAMES[0], *(pytest.param(name, marks=pytest.mark.soak) for name in NAMES[1:])])
def test_notebook_runs_from_top_to_bottom(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = read(name)
    install_cell(notebook).source = "pass"
    for cell in code_cells(notebook):
        cell.source = re.sub(r"^(!.*)$", rf"\1\n{CHECK}", cell.source, flags=re.MULTILINE)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")  # of the installed hwopt
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    NotebookClient(notebook, timeout=500, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert (tmp_path / "runs" / "first" / "final" / "model.safetensors").is_file()
    predictions = (tmp_path / "predictions.csv").read_text(encoding="utf-8").splitlines()
    assert len(predictions) == 6
    assert all(re.search(r",(positive|negative),", line) for line in predictions[1:])
