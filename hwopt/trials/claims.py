"""Measures the claims of a profile that this machine can check; the others are compared with the forecast of the plan.

A claim can be measured on the card of the profile only, a ratio too: no figure of another card is called measured. The model is
that of `[tuned_for]`, with made-up rows of the full length. All configurations are trained in turn in each round, so a ratio is
one of neighbours in time; its range is that of the rounds.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from hwopt.config.claim import Claim
from hwopt.errors import InputError
from hwopt.hardware.detect import detect
from hwopt.hardware.device import Hardware
from hwopt.memory.claims import Finding, Forecast, Found, described, judge
from hwopt.planning import auto_profile
from hwopt.planning.inputs import Inputs
from hwopt.system.cache import cache_folder
from hwopt.trials.benchmark import Effort, Progress
from hwopt.trials.made_up_job import write_made_up_job
from hwopt.trials.preparation import PREFIX
from hwopt.trials.processes import Launch, in_new_process
from hwopt.trials.progress import ProgressLine
from hwopt.trials.rounds import rotated
from hwopt.trials.trial import Outcome, Variant, run_trial

MEASURED = ("samples_per_second", "steps_per_second", "epoch_seconds", "total_seconds", "peak_memory_gib", "gpu_utilization")
"""Quantities that a trial measures."""
STEPS = 40


@dataclass(frozen=True)
class Setting:
    """A profile with changes, as one side of a claim."""

    profile: str
    changes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return " ".join((self.profile, *self.changes))


def sides(profile: str, claim: Claim) -> list[Setting]:
    """What a claim of `profile` is about; and its baseline, if it is a ratio."""
    own = Setting(profile, claim.changes)
    return [own, Setting(claim.against or profile, claim.against_changes)] if claim.is_ratio else [own]


class ClaimBench:
    """Checks the claims of profiles on the device `machine`."""

    def __init__(
        self, inputs: Inputs, machine: Hardware, forecast: Forecast, folder: Path, effort: Effort, launch: Launch = in_new_process
    ) -> None:
        self.inputs, self.machine, self.forecast = inputs, machine, forecast
        self.folder, self.effort, self.launch = folder, effort, launch
        self.measured: dict[Setting, dict[int, Outcome]] = {}
        self.failed: dict[Setting, Outcome] = {}

    def obstacle(self, profile: str, claim: Claim) -> str:
        """The card that this machine lacks for the claim; "" if it has the cards of both sides."""
        for side in sides(profile, claim):
            found = self.inputs.profile(side.profile)
            if found.card_of(self.machine) is None:
                card = " / ".join(found.card.match) or "its card"
                return f"needs {card}, found {self.machine.name}"
        return ""

    def measure(self, profile: str, progress: Progress) -> None:
        """Run the trials that the claims of `profile` need, in rounds."""
        claims = [
            claim
            for claim in self.inputs.profile(profile).content.claims
            if not claim.missing and claim.what in MEASURED and not self.obstacle(profile, claim)
        ]
        settings = {side.name: side for claim in claims for side in sides(profile, claim)}
        jobs = {name: self.job_of(side.profile) for name, side in settings.items()}
        for number in range(self.effort.rounds if settings else 0):
            progress.on_round(number + 1, self.effort.rounds)
            for name in rotated([name for name in settings if settings[name] not in self.failed], number):
                progress.on_trial(name, number + 1, self.effort.rounds, None)
                self.run_trial(settings[name], jobs[name], number)

    def job_of(self, profile: str) -> Path:
        """The made-up job for the model of `profile`, written once."""
        folder = self.folder / f"job-{Path(profile).stem}"
        path = folder / "job.toml"
        return path if path.is_file() else write_made_up_job(self.inputs.profile(profile), folder)

    def run_trial(self, setting: Setting, job: Path, number: int) -> None:
        folder = self.folder / f"trial-{number}"
        variant = Variant(setting.name, setting.profile, setting.changes)
        try:
            outcome = run_trial(job, variant, self.effort.steps or STEPS, folder, self.effort.limit_s, self.launch)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if outcome.completed:
            self.measured.setdefault(setting, {})[number] = outcome
        else:
            self.failed[setting] = outcome

    def findings(self, profile: str) -> Iterator[Finding]:
        """The verdicts on all claims of `profile`, in its order: measured, else by the forecast with the reason."""
        for claim in self.inputs.profile(profile).content.claims:
            if claim.missing or claim.what not in MEASURED:
                yield self.forecast.check(profile, claim)
            elif why := self.obstacle(profile, claim):
                yield self.forecast_of(profile, claim, why)
            elif failure := next((self.failed[side] for side in sides(profile, claim) if side in self.failed), None):
                what = f"not measured: {failure.variant.name}: {failure.ending}: {failure.message}"
                yield self.forecast_of(profile, claim, what)
            else:
                yield self.measured_finding(profile, claim)

    def forecast_of(self, profile: str, claim: Claim, why: str) -> Finding:
        """The verdict by the forecast, with the reason why nothing was measured."""
        found = self.forecast.check(profile, claim)
        return replace(found, explanation="; ".join(dict.fromkeys(filter(None, (found.explanation, why)))))

    def measured_finding(self, profile: str, claim: Claim) -> Finding:
        by_side = [self.values(side, claim) for side in sides(profile, claim)]
        if claim.is_ratio:
            own, base = by_side
            values = [own[number] / base[number] for number in sorted(own.keys() & base.keys()) if base[number]]
        else:
            values = list(by_side[0].values())
        if not values:
            return self.forecast_of(profile, claim, "the trial did not report the quantity")
        plan, _ = self.forecast.planned(profile, claim.changes, claim.samples)
        on = f"{described(plan)}, {len(values)} rounds, {self.machine.name}"
        return judge(profile, claim, Found(min(values), max(values), "measured", on))

    def values(self, setting: Setting, claim: Claim) -> dict[int, float]:
        """Round -> the quantity of the claim, of the rounds that have it."""
        found = {number: self.quantity(setting, claim, outcome) for number, outcome in self.measured.get(setting, {}).items()}
        return {number: value for number, value in found.items() if value is not None}

    def quantity(self, setting: Setting, claim: Claim, outcome: Outcome) -> float | None:
        """The quantity of the claim in one trial; None if it has none."""
        speed = outcome.rate("samples")
        match claim.what:
            case "samples_per_second":
                return speed
            case "steps_per_second":
                return outcome.rate("steps")
            case "peak_memory_gib":
                return outcome.peak_gib if claim.memory == "allocator" else outcome.device_gib
            case "gpu_utilization":
                return outcome.gpu_percent
        samples = claim.samples or self.inputs.profile(setting.profile).content.tuned_for.samples
        if not samples or not speed:
            return None
        epochs = 1.0
        if claim.what == "total_seconds":
            plan, _ = self.forecast.planned(setting.profile, setting.changes, claim.samples)
            epochs = plan.training.num_train_epochs
        return epochs * samples / speed


def check(inputs: Inputs, spec: str, effort: Effort, progress: ProgressLine) -> list[Finding]:
    """The verdicts on the claims of the profile `spec` ("auto": that of this machine). Trials run in a temporary folder.

    Raises InputError if the profile has no claims.
    """
    machine = detect()
    name = auto_profile.choose(machine, inputs.files, inputs.registry, inputs.profile)[0].name if spec == "auto" else spec
    if not inputs.profile(name).content.claims:
        raise InputError(f"--profile {name}: no claims. `hwopt claims` lists those of all profiles")
    with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as folder:
        bench = ClaimBench(inputs, machine, Forecast(inputs, cache_folder(), progress.on_plan), Path(folder), effort)
        bench.measure(name, progress)
        return list(bench.findings(name))
