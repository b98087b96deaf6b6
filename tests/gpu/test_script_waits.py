"""Counted launches and waits of a Trainer's step, with `hwopt.optimized` and without: the table of docs/your-script.md."""

from functools import partial
from typing import Any

import pytest
from programs import program

import hwopt

pytestmark = [
    pytest.mark.device("pretend"),
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning"),  # a default of TRL 1.16
]

SCRIPTS: Any = program("your_script")
MOST_LAUNCHES = 1.01
"""Launches of a step, relative to the unmodified script. Pairs need one more for each micro-batch."""


@pytest.mark.parametrize("name", ["Trainer, classes", "Trainer, causal", "RewardTrainer", "SentenceTransformerTrainer"])
def test_step_launches_and_waits_no_more_than_the_unmodified_script(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SCRIPTS, "ARGUMENTS", SCRIPTS.ARGUMENTS | SCRIPTS.CARD_ARGUMENTS)
    script = SCRIPTS.scripts()[name]
    launches, waits = SCRIPTS.per_step(script, SCRIPTS.as_it_is)
    own_launches, own_waits = SCRIPTS.per_step(script, partial(hwopt.optimized, profile="auto", **SCRIPTS.ON_CARD))
    assert own_launches <= MOST_LAUNCHES * launches
    assert own_waits < waits
