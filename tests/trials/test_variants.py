"""The variants of a bench: which there are, and which need not run."""

from collections.abc import Callable
from pathlib import Path

import pytest

from hwopt.config.job import JobFile
from hwopt.errors import InputError, PluginError
from hwopt.planning.inputs import Inputs
from hwopt.planning.plan import Plan
from hwopt.testing import plan_for, tiny_job
from hwopt.trials.trial import Variant
from hwopt.trials.variants import (
    BASELINE,
    COPY,
    PlannedVariant,
    effect_between,
    loss_obstacle,
    planned_variants,
    variants_of,
)

PROFILE = """name = "mine"
[training]
learning_rate = 1e-3
[plugins.optimizer]
name = "adamw_torch_fused"
fallback = []
[plugins.batch]
train = 4
[plugins.tf32]
[plugins.adapter]
enabled = false
"""
OTHER = PROFILE.replace('"mine"', '"other"').replace("train = 4", "train = 8").replace("[plugins.tf32]\n", "")

BASELINES = Path(__file__).parents[2] / "benchmarks" / "profiles"


class Planner:
    """Plans variants of a tiny job for this machine."""

    def __init__(self, folder: Path) -> None:
        (folder / "mine.toml").write_text(PROFILE)
        (folder / "other.toml").write_text(OTHER)
        self.inputs, self.job, self.folder = Inputs(), tiny_job(folder / "data"), folder
        self.subject = Variant("profile", str(folder / "mine.toml"))

    def variants(self, against: str | None = None) -> list[PlannedVariant]:
        return variants_of(self.subject, str(self.folder / against) if against else None, self.inputs, None)

    def __call__(self, variant: Variant) -> Plan:
        return plan_for(self.inputs.profile(variant.profile, variant.assignments), self.job)

    def candidates(self, against: str | None = None, fit: Callable[[Plan], str] = lambda plan: "") -> dict[str, PlannedVariant]:
        return {each.name: each for each in planned_variants(self.variants(against), self, fit)}


@pytest.fixture
def planner(tmp_path: Path) -> Planner:
    return Planner(tmp_path)


def test_plugins_are_added_to_the_baseline_and_left_out_of_the_profile(planner: Planner) -> None:
    found = planner.candidates()
    plan = found[BASELINE].plan
    assert list(plan.applied()) == []
    assert (plan.batch.step, plan.training.learning_rate) == (8, 1e-3)
    assert list(found) == [BASELINE, COPY, "+ optimizer", "+ batch", "+ tf32", "profile", "- optimizer", "- batch", "- tf32"]
    names = {
        name: {entry.name for entry in candidate.plan.applied()}
        for name, candidate in found.items()
        if candidate.plan is not None
    }
    assert names["+ optimizer"] == {"optimizer"}
    assert names["profile"] == {"optimizer", "batch"}
    assert names["- optimizer"] == {"batch"}
    assert (found["+ optimizer"].reference, found["- optimizer"].reference) == (BASELINE, "profile")
    for name in ("+ tf32", "- tf32"):
        assert (found[name].ending, found[name].runs) == ("not applied here", False)
        assert "CUDA" in found[name].note
    assert found["+ batch"].runs


def test_against_another_profile_only_the_differing_plugins_count(planner: Planner) -> None:
    found = planner.candidates("other.toml")
    assert list(found) == [BASELINE, COPY, "+ batch", "+ tf32", "profile", "- batch", "- tf32"]
    steps = {name: candidate.plan.batch.step for name, candidate in found.items() if candidate.plan is not None}
    assert (steps[BASELINE], steps["+ batch"], steps["profile"], steps["- batch"]) == (8, 4, 4, 8)


def test_plan_that_does_not_fit_is_not_run(planner: Planner) -> None:
    found = planner.candidates(fit=lambda plan: "9 of 8 GiB" if plan.batch.step == 4 else "")
    endings = {name: (each.ending, each.note) for name, each in found.items() if each.ending and each.plugin != "tf32"}
    refused = ("does not fit", "9 of 8 GiB")
    assert endings == {"+ batch": refused, "profile": refused, "- optimizer": refused}


def test_refused_variant_is_a_row_with_the_message(planner: Planner) -> None:
    def resolve(variant: Variant) -> Plan:
        if variant.name == "+ optimizer":
            raise PluginError("plugin 'optimizer' needs plugin 'batch'")
        return planner(variant)

    found = {each.name: each for each in planned_variants(planner.variants(), resolve, lambda plan: "")}
    assert (found["+ optimizer"].ending, found["+ optimizer"].note) == ("refused", "plugin 'optimizer' needs plugin 'batch'")


def test_profile_without_effect_here_is_an_error(planner: Planner, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('name = "mine"\n[plugins.tf32]\n')
    with pytest.raises(InputError, match="equal plans on this machine: there is nothing to compare"):
        planner.candidates()


def test_baseline_is_another_profile_or_none() -> None:
    inputs, before = Inputs(), str(BASELINES / "rtx3070_8gb_before.toml")
    found = variants_of(Variant("profile", "rtx3070_8gb"), before, inputs, None)
    assert found[0].variant.profile == before
    added = [each.plugin for each in found if each.role == "added"]
    assert added == ["precision", "optimizer", "batch", "dataloader", "schedule"]
    for against in ("none", None):
        baseline, *_, last = variants_of(Variant("profile", "rtx3070_8gb"), against, inputs, None)
        assert baseline.variant.profile == "rtx3070_8gb"
        assert last.variant.assignments == (f"plugins.{last.plugin}.enabled=false",)


def test_losses_of_other_steps_or_hyperparameters_are_not_compared(planner: Planner) -> None:
    base = planner(Variant("a", planner.subject.profile))
    assert loss_obstacle(base, base) == ""
    larger = planner(Variant("b", planner.subject.profile, ("plugins.batch={train=16}",)))
    assert loss_obstacle(larger, base) == "16 instead of 4 rows per step"
    job: JobFile = tiny_job(planner.folder / "more", learning_rate=5e-3)
    other = plan_for(planner.inputs.profile(planner.subject.profile), job)
    assert loss_obstacle(other, base) == "other learning_rate"


def test_effect_is_that_of_the_plugins_that_differ(planner: Planner) -> None:
    base = planner(Variant("a", planner.subject.profile))
    assert effect_between(base, base) == "bits"
    without = planner(Variant("b", planner.subject.profile, ("plugins.optimizer.enabled=false",)))
    assert effect_between(base, without) == "rounding"
    adapted = planner(Variant("c", planner.subject.profile, ("plugins.adapter={always=true, r=2}",)))
    assert effect_between(adapted, base) == "method"
