"""The estimate behind the rules on needless savings, against the memory planner."""

from __future__ import annotations

from pathlib import Path

import pytest

from hwopt import api
from hwopt.configs.check.rules.card import estimate_gib
from hwopt.configs.imported_files import BERT_BASE
from hwopt.configs.recognise import read_source, view_of
from hwopt.planning.inputs import Inputs

pytestmark = pytest.mark.daily

PROFILE = """\
name = "p"
[card]
match = ["Tesla T4"]
memory_gib = 14.56
compute_capability = "7.5"
[plugins.precision]
dtype = "fp16"
[plugins.sdpa]
[plugins.batch]
train = {rows}
"""


@pytest.mark.parametrize(("rows", "length"), [(16, 192), (64, 192)])
def test_estimate_is_above_the_planned_memory_of_bert_base_by_less_than_half(rows: int, length: int, tmp_path: Path) -> None:
    profile, job = tmp_path / "p.toml", tmp_path / "job.toml"
    profile.write_text(PROFILE.format(rows=rows))
    config = ", ".join(f"{key} = {value!r}" for key, value in BERT_BASE.items())
    job.write_text(f'[model]\nconfig = {{ {config} }}\n[data]\ntrain = "t.csv"\nmax_length = {length}\n')
    plan = api.resolve(str(profile), job, hardware="profile")
    planned = api.with_memory(plan, lambda changes: plan).memory
    assert planned is not None
    assert planned.tier == "traced"
    estimate = estimate_gib(view_of(read_source(profile), Inputs()), 109.5e6, length)
    assert planned.peak_gib < estimate < 1.5 * planned.peak_gib
