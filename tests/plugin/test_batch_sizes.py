"""BatchSizes: rows of an evaluation batch are asked for in one way."""

import re
from pathlib import Path

import hwopt
import hwopt_plugins
from hwopt.plugin import BatchSizes


def test_rows_of_an_evaluation_batch() -> None:
    sizes = BatchSizes.of({"train": 12, "effective": 100})
    assert (sizes.eval_rows(), sizes.eval_rows(10_000)) == (24, 24)
    other = sizes.evaluating(3)
    assert (other.eval_rows(10_000), other.train, other.step) == (3, 12, 100)


def test_only_batch_sizes_reads_its_field_eval() -> None:
    """Another limit of an evaluation batch is then a change of `BatchSizes.eval_rows` alone."""
    files = [path for package in (hwopt, hwopt_plugins) for path in Path(package.__path__[0]).rglob("*.py")]
    assert {"batch_sizes.py", "batch.py"} <= {path.name for path in files}
    readers = [str(path) for path in files if re.search(r"(batch|sizes(_of\(.*?\))?)\.eval\b", path.read_text(encoding="utf-8"))]
    assert not readers
