"""Measures the claims of a profile that this machine can check; the others are compared with the forecast of the plan.

A claim can be measured on the card of the profile only, a ratio too: no figure of another card is called measured. A profile
without a card is one for CPUs: its ratios are measured on any CPU. The model is that of `[tuned_for]`, with made-up rows of the
full length. All configurations are trained in turn in each round, so a ratio is one of neighbours in time; its range is that of
the rounds.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache as memoized
from pathlib import Path
from statistics import median

from hwopt.config.card import longest_match
from hwopt.config.claim import Claim
from hwopt.errors import InputError
from hwopt.hardware.detect import detect
from hwopt.hardware.device import Hardware
from hwopt.memory.claims import Finding, Forecast, Found, described, judge
from hwopt.memory.reference import reference_plan
from hwopt.planning import auto_profile
from hwopt.planning.inputs import Inputs
from hwopt.planning.plan import Plan
from hwopt.system.cache import cache_folder
from hwopt.trials.benchmark import Effort, Progress, launcher_for, new_processes, remarks
from hwopt.trials.made_up_job import write_made_up_job
from hwopt.trials.preparation import PREFIX
from hwopt.trials.processes import Launch
from hwopt.trials.progress import ProgressLine
from hwopt.trials.rounds import rotated
from hwopt.trials.trial import MEMORY_KINDS, Outcome, Variant, run_trial

MOST_SPREAD = 1.5
"""Rounds that differ by a larger factor confirm nothing: almost any claim lies between them."""
SPEEDS = ("samples_per_second", "steps_per_second", "epoch_seconds", "total_seconds")
MEASURED = (*SPEEDS, "peak_memory_gib", "free_memory_gib", "optimizer_state_gib", "gpu_utilization")
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
    """Checks the claims of profiles on the device `machine`. `measure` may be interrupted: what is measured by then stays."""

    def __init__(
        self,
        inputs: Inputs,
        machine: Hardware,
        forecast: Forecast,
        folder: Path,
        effort: Effort,
        launcher: Callable[[], AbstractContextManager[Launch]] = new_processes,
    ) -> None:
        self.inputs, self.machine, self.forecast = inputs, machine, forecast
        self.folder, self.effort, self.launcher = folder, effort, launcher
        self.measured: dict[Setting, dict[int, Outcome]] = {}
        self.failed: dict[Setting, Outcome] = {}
        self.trial_seconds: list[float] = []
        self.interrupted = False
        self.plan_of = memoized(self._plan_of)

    def obstacle(self, profile: str, claim: Claim) -> str:
        """The device that this machine lacks for the claim; "" if it has the devices of both sides."""
        for side in sides(profile, claim):
            card, machine = self.inputs.profile(side.profile).card, self.machine
            if card.capability is None and machine.device_type == "cpu":
                if claim.is_ratio or longest_match(card.match, machine.name):
                    continue
                if not card.match:
                    return f"an absolute figure needs the name of its CPU: {side.profile} has no card.match"
            elif self.inputs.profile(side.profile).card_of(machine) is not None:
                continue
            name = " / ".join(card.match) or ("a CPU" if card.capability is None else "its card")
            return f"needs {name}, found {machine.name}"
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
        rounds = self.effort.rounds
        for number in range(rounds):
            names = [name for name in settings if settings[name] not in self.failed]
            if not names:
                return
            progress.on_round(number + 1, rounds)
            with self.launcher() as launch:
                for place, name in enumerate(rotated(names, number)):
                    left = len(names) - place + len(names) * (rounds - number - 1)
                    progress.on_trial(name, number + 1, rounds, median(self.trial_seconds) * left if self.trial_seconds else None)
                    self.run_trial(settings[name], jobs[name], number, launch)

    def job_of(self, profile: str) -> Path:
        """The made-up job for the model of `profile`, written once."""
        folder = self.folder / f"job-{Path(profile).stem}"
        path = folder / "job.toml"
        return path if path.is_file() else write_made_up_job(self.inputs.profile(profile), folder)

    def run_trial(self, setting: Setting, job: Path, number: int, launch: Launch) -> None:
        folder, began = self.folder / f"trial-{number}", time.monotonic()
        variant = Variant(setting.name, setting.profile, setting.changes)
        try:
            outcome = run_trial(job, variant, self.effort.steps or STEPS, folder, self.effort.limit_s, launch)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        self.trial_seconds.append(time.monotonic() - began)
        if outcome.completed:
            self.measured.setdefault(setting, {})[number] = outcome
        else:
            self.failed[setting] = outcome

    def findings(self, profile: str) -> Iterator[Finding]:
        """The verdicts on all claims of `profile`, in its order: measured, else by the forecast with the reason."""
        for claim in self.inputs.profile(profile).content.claims:
            if claim.missing or claim.what not in MEASURED:
                yield self.forecast_of(profile, claim)
            elif why := self.obstacle(profile, claim):
                yield self.forecast_of(profile, claim, why)
            elif failure := next((self.failed[side] for side in sides(profile, claim) if side in self.failed), None):
                what = f"not measured: {failure.variant.name}: {failure.ending}: {failure.message}"
                yield self.forecast_of(profile, claim, what)
            else:
                yield self.measured_finding(profile, claim)

    def forecast_of(self, profile: str, claim: Claim, why: str = "") -> Finding:
        """The verdict by the forecast, with the reason why nothing was measured. No forecast is made after an interruption."""
        if self.interrupted:
            return judge(profile, claim, None, why or claim.missing or "interrupted before the forecast")
        found = self.forecast.check(profile, claim)
        return replace(found, explanation="; ".join(dict.fromkeys(filter(None, (found.explanation, why)))))

    def measured_finding(self, profile: str, claim: Claim) -> Finding:
        """The verdict by the trials; by the forecast if they do not have the quantity."""
        by_side = [self.values(side, claim) for side in sides(profile, claim)]
        rounds = sorted(set.intersection(*(set(values) for values in by_side)))
        if not rounds:
            complete = all(side in self.measured for side in sides(profile, claim))
            why = "the trial did not report the quantity" if complete else "interrupted before it was measured"
            return self.forecast_of(profile, claim, why)
        own = by_side[0]
        values = [own[number] / by_side[1][number] if claim.is_ratio else own[number] for number in rounds]
        on = f"{described(self.plan_of(sides(profile, claim)[0]), self.machine.name)}, rounds: {len(rounds)}"
        finding = judge(profile, claim, Found(min(values), max(values), "measured", on))
        if finding.verdict == "confirmed" and max(values) > MOST_SPREAD * min(values):
            why = f"the rounds differ by a factor of {max(values) / min(values):.1f}; measure again on an idle machine"
            finding = replace(finding, verdict="not measurable here", explanation=why)
        notes = dict.fromkeys(note for side in sides(profile, claim) for note in self.remarks(side))
        return replace(finding, explanation="; ".join(filter(None, (finding.explanation, *notes))))

    def remarks(self, side: Setting) -> Iterator[str]:
        """What a reader must know of the trials of `side`: plugins that were not active, and smaller micro-batches."""
        outcomes = list(self.measured[side].values())
        yield from (f"{side.name}: {remark}" for remark in remarks(self.plan_of(side), outcomes))

    def _plan_of(self, side: Setting) -> Plan:
        return reference_plan(side.profile, self.inputs, self.forecast.cache, side.changes)

    def values(self, setting: Setting, claim: Claim) -> dict[int, float]:
        """Round -> the quantity of the claim, of the rounds that have it."""
        found = {number: self.quantity(setting, claim, outcome) for number, outcome in self.measured.get(setting, {}).items()}
        return {number: value for number, value in found.items() if value}

    def quantity(self, setting: Setting, claim: Claim, outcome: Outcome) -> float | None:
        """The quantity of the claim in one trial; None if it has none."""
        match claim.what:
            case "steps_per_second":
                return outcome.rate("steps")
            case "peak_memory_gib":
                if claim.memory == "nvidia-smi":
                    return outcome.device_gib
                return outcome.peak_gib if outcome.memory_kind == MEMORY_KINDS["cuda"] else None
            case "free_memory_gib":
                return None if outcome.device_gib is None else self.machine.free_memory_gib - outcome.device_gib
            case "optimizer_state_gib":
                return outcome.held_gib.get("optimizer_state")
            case "gpu_utilization":
                return outcome.gpu_percent
        speed = outcome.rate("samples")
        if claim.what == "samples_per_second" or not speed:
            return speed
        samples = claim.samples or self.inputs.profile(setting.profile).content.tuned_for.samples
        if not samples:
            return None
        epochs = self.plan_of(setting).training.num_train_epochs if claim.what == "total_seconds" else 1.0
        return epochs * samples / speed


def check(inputs: Inputs, spec: str, effort: Effort, progress: ProgressLine) -> tuple[list[Finding], BaseException | None]:
    """The verdicts on the claims of the profile `spec` ("auto": that of this machine), and what a signal raised that ended
    the measurement early. Trials run in a temporary folder.

    Raises InputError if the profile has no claims.
    """
    machine = detect()
    name = auto_profile.choose(machine, inputs.files, inputs.registry, inputs.profile)[0].name if spec == "auto" else spec
    if not inputs.profile(name).content.claims:
        raise InputError(f"--profile {name}: no claims. `hwopt claims` lists those of all profiles")
    forecast, launcher = Forecast(inputs, cache_folder(), progress.on_plan), launcher_for(machine.device_type)
    ended: BaseException | None = None
    with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as folder:
        bench = ClaimBench(inputs, machine, forecast, Path(folder), effort, launcher)
        try:
            bench.measure(name, progress)
        except (KeyboardInterrupt, SystemExit) as signal:
            ended, bench.interrupted = signal, True
        return list(bench.findings(name)), ended
