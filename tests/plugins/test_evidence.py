"""Rules for the evidence of every installed plugin: what it may read, and that a mutation of a library turns it inactive."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from applied import Applied
from plugin_cases import LAYERS, Mutation, Part, all_cases, cases, check_mutation, mutations

from hwopt.planning.plan import Plan
from hwopt.plugin import Evidence, Plugin, RunView, Stage
from hwopt.plugin.registry import Registry
from hwopt.testing import TINY_LLAMA, Recorder, plan_for, tiny_job, tiny_profile, train_tiny
from hwopt.testing.plugin_contract import observed_evidence
from hwopt.training.evidence import worst_of_ranks


@pytest.mark.parametrize("name", Registry().names)
def test_every_plugin_has_a_mutation_that_turns_its_evidence_inactive(name: str) -> None:
    if file := cases(name).mutations_in:
        assert f"def test_evidence_of_{name}_" in (Path(__file__).parents[2] / file).read_text(encoding="utf-8")
        return
    assert cases(name).mutations, (
        f"Add a Mutation to the CASES of {name!r}: a change to the library that it uses, after which it has no effect. "
        "Its evidence must then be inactive"
    )


@pytest.mark.parametrize("name", Registry().names)
def test_every_plugin_loses_its_effect_in_parts_or_says_why_not(name: str) -> None:
    assert bool(cases(name).parts) != bool(cases(name).whole)


# bitsandbytes prefers rows of a multiple of 64 elements; the tiny decoder has 32
pytestmark = pytest.mark.filterwarnings("ignore:inner dimension .* is not aligned for fast kernel:UserWarning")


@pytest.mark.parametrize(("name", "mutation"), mutations())
def test_evidence_of_an_optimization_without_effect_is_inactive(
    name: str, mutation: Mutation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_mutation(name, mutation, tmp_path, monkeypatch)


PART = [pytest.param(name, part, id=part.what) for name, its in all_cases().items() for part in its.parts]
LATE = [
    pytest.param(name, part, id=part.what, marks=() if name in ("checkpointing", "optimizer") else pytest.mark.integration)
    for name, its in all_cases().items()
    for part in its.parts
]
"""By default one effect of every step and one state; the others are integration tests."""
FOUR_LAYERS = TINY_LLAMA | {"num_hidden_layers": LAYERS}


def plan_of(folder: Path, name: str, part: Part, steps: int = 1) -> Plan:
    job = tiny_job(folder / "data", "causal-lm", config=FOUR_LAYERS, max_steps=steps)
    return plan_for(tiny_profile(**cases(name).beside, **{name: part.options}), job)


def of(found: list[Any], name: str) -> Evidence:
    return next(each for entry, each in found if entry.name == name)


@pytest.mark.parametrize(("name", "part"), PART)
def test_evidence_of_an_optimization_of_all_parts_but_one_is_inactive(
    name: str, part: Part, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(tmp_path, name, part)
    part.patch(monkeypatch, lambda number: number == 0)
    found = of(train_tiny(plan, tmp_path).found, name)
    assert found.status == "inactive", found.seen


@pytest.mark.parametrize(("name", "part"), LATE)
def test_evidence_of_an_optimization_that_ends_after_the_first_step_is_inactive(
    name: str, part: Part, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Late(Recorder):
        def on_evidence(self, run: Any, found: list[Any]) -> None:
            super().on_evidence(run, found)
            part.patch(monkeypatch, lambda number: number % 2 == 0)
            part.later(run)

    recorder = train_tiny(plan_of(tmp_path, name, part, steps=2), tmp_path, Late())
    assert of(recorder.found, name).status == "active", "with the whole model"
    assert (found := of(recorder.found_at_end, name)).status == "inactive", found.seen
    assert any(f"plugin '{name}' was active after the first step and is not any more" in text for text in recorder.warnings)


class Trusting(Applied):
    name = "trusting"
    stage = Stage.LOOP

    def evidence(self, run: RunView) -> Evidence:
        return Evidence.active("on") if self.options.on else Evidence.inactive("off")


class Planned(Trusting):
    def evidence(self, run: RunView) -> Evidence:
        return Evidence.active(f"{run.plan.batch} rows")


@pytest.mark.parametrize(("plugin", "why"), [(Trusting, "reads options.on"), (Planned, "reads run.plan")])
def test_contract_test_refuses_evidence_from_what_was_asked_for(plugin: type[Plugin], why: str) -> None:
    with pytest.raises(AssertionError, match=why):
        observed_evidence(plugin(SimpleNamespace(on=True)), SimpleNamespace(plan=SimpleNamespace(batch=8)))


def test_evidence_that_is_inactive_on_another_rank_is_inactive(monkeypatch: pytest.MonkeyPatch) -> None:
    import accelerate.utils

    entry: Any = SimpleNamespace(name="a")
    ranks = [[Evidence.active("on")], [Evidence.inactive("2 of 8 layers")]]
    monkeypatch.setattr(accelerate.utils, "gather_object", lambda own: ranks)
    (_, found), *_ = worst_of_ranks([(entry, Evidence.active("on"))], 0)
    assert (found.status, found.seen) == ("inactive", "on rank 1: 2 of 8 layers")
    (_, found), *_ = worst_of_ranks([(entry, ranks[1][0])], 1)
    assert found.seen == "2 of 8 layers"
