"""The planned figures in the comments of the profiles are those that the planner gives today."""

from pathlib import Path
from typing import Any

import pytest
from pinned_torch import with_pinned_torch
from programs import program

from hwopt.planning.inputs import Inputs

pytestmark = pytest.mark.daily

FIGURES: Any = program("profile_figures")
COMMENTS = {name: FIGURES.FIGURES.search(path.read_text(encoding="utf-8")) for name, path in FIGURES.FILES.items()}
STATED = {name: found[0] for name, found in COMMENTS.items() if found}


@with_pinned_torch
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", STATED)
def test_planned_figures_are_current(name: str, tmp_path: Path) -> None:
    """`python benchmarks/profile_figures.py --write` rewrites them."""
    assert FIGURES.planned_figures(name, Inputs(), tmp_path) == STATED[name]


@pytest.mark.parametrize("name", ["rtx3070_8gb", "rtx3090_24gb"])
def test_reference_model_has_the_stated_size(name: str, tmp_path: Path) -> None:
    """BERT-base has 109.5 M parameters; with the demo's vocabulary it would have 92.2 M."""
    plan = FIGURES.reference_plan(name, Inputs(), tmp_path)
    assert plan.model.parameters == pytest.approx(plan.profile.content.tuned_for.parameters, rel=0.002)
