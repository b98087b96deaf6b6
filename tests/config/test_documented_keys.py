"""Every key of a job has a row in docs/jobs.md."""

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from hwopt.config.job import Job

PAGE = Path(__file__).parents[2] / "docs/jobs.md"


@pytest.mark.parametrize("table", Job.model_fields)
def test_every_key_of_a_job_has_a_row(table: str) -> None:
    """The first cell of a row names keys: `training.max_steps`, or `max_steps` behind another key of the table."""
    rows = re.findall(rf"^\| (`{table}\..*?) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    named = {key.removeprefix(f"{table}.") for row in rows for key in re.findall(r"`([\w.]+)`", row)}
    model = Job.model_fields[table].annotation
    assert model is not None
    assert issubclass(model, BaseModel)
    assert named == set(model.model_fields)
