"""Reliability on two ranks: a launch whose rank, worker or launcher is killed, signalled or hung loses no step.

The launches are real processes; a test disturbs one at a step of its metrics.jsonl. Independent launches run at the same time.
Resumed runs and reference runs are forks of the test process. The short forms run by default, the full ones as `soak`; `figures`
keeps the measurements for docs/reliability.md.
"""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from integration.forks import until, wait_for_exit
from integration.ranks_folder import RUN
from integration.reliability import Work, status, step_of
from safetensors.torch import load_file

from hwopt.saving import reader as resume
from hwopt.system import signals
from hwopt.testing import launcher, logged, relative_error

pytestmark = [pytest.mark.daily, pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")]

Figures = Callable[..., None]
LAST = 150
PROCESSES = [sys.executable, "-m", "hwopt"]
LAUNCH = [*launcher(2), "-m", "hwopt"]


@pytest.fixture(scope="module")
def work(warm: None, tmp_path_factory: pytest.TempPathFactory) -> Work:
    work = Work(tmp_path_factory.mktemp("ranks"), LAST, ranks=2)
    work.write(logging_steps=5, eval_steps=70, save_steps=25, save_total_limit=9)
    return work


@pytest.fixture(scope="module")
def alone(work: Work) -> Path:
    """An undisturbed run of one rank."""
    return work.finish("alone", ranks=1)


@pytest.fixture(scope="module")
def undisturbed(work: Work, alone: Path) -> Path:
    return work.finish("undisturbed")


@pytest.mark.parametrize("kills", [pytest.param(2, id="short"), pytest.param(60, id="full", marks=pytest.mark.soak)])
def test_two_killed_ranks_resume_exactly(work: Work, undisturbed: Path, kills: int, figures: Figures) -> None:
    """The first rank, the second or both are killed. The remaining rank exits without help."""
    chance = random.Random(kills)
    killed = 0
    while killed < kills:
        name = f"killed-{killed}"
        pids = work.started(name)
        wanted = chance.randint(0, LAST - 60)
        until(lambda name=name, wanted=wanted: step_of(work.run(name)) >= wanted)
        time.sleep(chance.uniform(0, 0.2))
        victims = ([pids[0]], [pids[1]], pids)[killed % 3]
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        codes = {pid: wait_for_exit(pid) for pid in pids}
        if {codes[pid] for pid in victims} != {-9}:  # the run had ended before the kill
            shutil.rmtree(work.run(name))
            continue
        assert all(codes.values())
        work.resumes_exactly(name, undisturbed, saved_alone=victims == pids[1:])
        killed += 1
    figures("SIGKILL anywhere, resume", f"2 ranks: {killed} kills of one or both: 0 different hashes, 0 steps lost or repeated")


def test_resume_on_another_number_of_ranks_repeats_the_same_steps(work: Work, alone: Path, undisturbed: Path) -> None:
    """One rank to two and two to one: the samples are the same, the weights differ by rounding only."""
    expected = load_file(alone / "checkpoint-150" / "model.safetensors")
    assert relative_error(load_file(undisturbed / "checkpoint-150" / "model.safetensors"), expected) <= 1e-5
    for before, ranks in ((alone, 2), (undisturbed, 1)):
        name = f"from-{before.name}"
        run = work.finish(name, "--resume-from", str(before / "checkpoint-75"), ranks=ranks)
        assert relative_error(load_file(run / "checkpoint-150" / "model.safetensors"), expected) <= 1e-5
        assert logged(run, "step") == [step for step in logged(alone, "step") if step > 75]
        assert logged(run, "loss") == pytest.approx(logged(alone, "loss")[15:], rel=1e-4)


@dataclass
class Launch:
    """A real launch of two ranks in `work.folder`. All its processes have `mark` in their environment."""

    work: Work
    name: str
    command: Sequence[str]
    process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.mark = f"{self.work.folder}/{self.name}"
        self.output_path = self.work.folder / f"{self.name}.out"
        with open(self.output_path, "wb") as output:
            self.process = subprocess.Popen(
                self.command,
                cwd=self.work.folder,
                env={**os.environ, "ACCELERATE_USE_CPU": "true", "HWOPT_TEST_LAUNCH": self.mark},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # a background job of a shell ignores SIGINT, and its child processes inherit that
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
                start_new_session=True,
            )

    @property
    def run(self) -> Path:
        return self.work.run(self.name)

    def until_step(self, step: int) -> None:
        until(lambda: step_of(self.run) >= step or self.process.poll() is not None)
        assert self.process.poll() is None, self.output

    @property
    def output(self) -> str:
        return self.output_path.read_text(errors="replace")

    def rank(self, number: int) -> psutil.Process:
        ranks = psutil.Process(self.process.pid).children()
        return next(each for each in ranks if each.environ().get("RANK") == str(number))

    def wait(self, within: float = 240.0) -> int:
        try:
            return self.process.wait(within)
        finally:
            if self.process.poll() is None:
                for process in self.processes():
                    process.kill()

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get("HWOPT_TEST_LAUNCH") == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def assert_no_process_left(self) -> None:
        """Wait 2 s: a data-loading worker needs a moment to notice the death of its parent."""
        until(lambda: not self.processes(), within=2)


def launched(work: Work, name: str, accelerate: bool, *arguments: str) -> Launch:
    command = LAUNCH if accelerate else PROCESSES
    return Launch(work, name, [*command, *RUN, "--name", name, *([] if accelerate else ["--processes", "2"]), *arguments])


SIGNALS = [
    (accelerate, target, number)
    for target in ("rank", "launcher", "group")
    for accelerate in (False, True)
    for number in (signal.SIGTERM, signal.SIGINT)
]
SHORT = [SIGNALS[at] for at in (3, 8)]
"""SIGINT to a rank under `accelerate launch`, SIGTERM to the group of `--processes`."""


@pytest.mark.parametrize("cases", [pytest.param(SHORT, id="short"), pytest.param(SIGNALS * 5, id="full", marks=pytest.mark.soak)])
def test_signal_saves_on_all_ranks(
    work: Work, undisturbed: Path, cases: list[tuple[bool, str, signal.Signals]], figures: Figures
) -> None:
    chance = random.Random(len(cases))
    for first in range(0, len(cases), 2):
        pairs = [(case, launched(work, f"signalled-{first + at}", case[0])) for at, case in enumerate(cases[first : first + 2])]
        for (_, target, number), launch in pairs:
            launch.until_step(10)
            time.sleep(chance.uniform(0, 0.3))
            if target == "rank":
                launch.rank(chance.randint(0, 1)).send_signal(number)
            elif target == "launcher":
                launch.process.send_signal(number)
            else:
                os.killpg(launch.process.pid, number)
        for (accelerate, target, number), launch in pairs:
            code = signals.EXIT_CODES[number]
            assert launch.wait() == (1 if accelerate else code), (target, launch.output)
            stopping = "Stopping after this step, then saving. Signal again to exit now."
            assert accelerate or launch.output.count(stopping) == 1, (target, launch.output)
            launch.assert_no_process_left()
            assert status(launch.run)["exit_code"] == code, (target, launch.output)
            found = resume.latest_valid(launch.run, lambda message: None)
            assert f"after step {found.step}, saved" in status(launch.run)["message"] or not accelerate
            assert found.step >= step_of(launch.run)
            work.resumes_exactly(launch.name, undisturbed)
    figures(
        "SIGTERM/SIGINT at random moments",
        f"2 ranks: {len(cases)} of {len(cases)} to a rank, the launcher or the group, of `--processes 2` and of "
        "`accelerate launch`: saved at one step by all, 143/130 in status.json, no process left, resume exact",
    )


Victims = list[tuple[str, signal.Signals]]
PAIRS: list[Victims] = [
    [("worker", signal.SIGSTOP), ("rank", signal.SIGKILL)],
    [("rank", signal.SIGSTOP), ("worker", signal.SIGKILL)],
]
"""Launches that run side by side."""


@pytest.mark.parametrize(
    "pairs", [pytest.param([PAIRS[0][:1]], id="short"), pytest.param(PAIRS * 15, id="full", marks=pytest.mark.soak)]
)
def test_hung_or_killed_process_ends_the_run(work: Work, undisturbed: Path, pairs: list[Victims], figures: Figures) -> None:
    """All processes exit with code 9; how long after training.hang_timeout is measured."""
    chance = random.Random(len(pairs))
    limit = 5.0
    slowest = 0.0
    options = ["--set", f"training.hang_timeout={limit:g}", "--set", "plugins.dataloader.num_workers=1"]
    for turn, pair in enumerate(pairs):
        launches = [launched(work, f"{who}-{number.name}-{turn}", False, *options) for who, number in pair]
        disturbed = []
        for (who, number), launch in zip(pair, launches, strict=True):
            launch.until_step(15)  # at step 10 the newest worker may be an evaluation worker, which exits soon
            victim = launch.rank(chance.randint(0, 1))
            if who == "worker":
                victim = max(victim.children(), key=lambda each: each.create_time())
            victim.send_signal(number)
            disturbed.append(time.monotonic())
        for launch, since in zip(launches, disturbed, strict=True):
            assert launch.wait() == 9, (pair, launch.output)
            launch.assert_no_process_left()
            slowest = max(slowest, time.monotonic() - since)
        for (who, number), launch in zip(pair, launches, strict=True):
            assert status(launch.run)["exit_code"] == 9, (who, number)
            if number == signal.SIGSTOP:
                stacks = list(launch.run.glob("stacks-rank-*.txt"))
                assert any("hwopt" in path.read_text() for path in stacks), who
                assert "no progress for" in launch.output
                assert "no progress for" in status(launch.run)["message"]
            work.resumes_exactly(launch.name, undisturbed, saved_alone=number == signal.SIGKILL)
    figures(
        "worker or rank killed or hung",
        f"{len(pairs)} data-loading workers and {len(pairs)} of 2 ranks, half of them SIGSTOPped, half SIGKILLed: exit 9 at most "
        f"{slowest:.0f} s after it (training.hang_timeout = {limit:g}), no process left, resume exact",
    )


def test_ranks_end_with_their_launcher(work: Work, undisturbed: Path) -> None:
    """If the launcher is killed, its ranks save as at SIGTERM and exit."""
    launch = launched(work, "orphans", False)
    launch.until_step(10)
    launch.process.kill()
    launch.wait()
    until(lambda: not launch.processes(), within=60)
    assert status(launch.run)["exit_code"] == 143, launch.output
    assert resume.list_checkpoints(launch.run)
    work.resumes_exactly(launch.name, undisturbed)
