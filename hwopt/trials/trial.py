"""A trial: one variant of a job, trained for a few optimizer steps in a process of its own (hwopt.trials.child).

That process writes the files of a run folder, which are read here as those of any run. It is a new interpreter, or on a CPU a
fork of one that has imported the libraries, which takes longer than a small trial. A fork cannot use CUDA if an import has
initialized it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from hwopt.errors import DataError, DoesNotFitError, InputError, PluginError
from hwopt.model.remote_code import trusted_models
from hwopt.planning.plan import Plan
from hwopt.records.run_files import read_object, read_status
from hwopt.records.throughput import Unit, Window, rate
from hwopt.runs.record import read_record
from hwopt.system.atomic_folder import write_json
from hwopt.system.fork_server import ForkServer, ServerEnded, kill_session
from hwopt.text import cut, printable

Launch = Callable[[Path, float], int | None]
"""(folder of a trial, seconds) -> the exit code of its process (below 0: a signal), or None if it was killed at the limit."""

PROGRAM = "hwopt.trials.child"
START_UP = f"import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {PROGRAM} import main; main(*sys.argv[2:])"
"""The program of a new interpreter."""

TrialEnding = Literal["completed", "out of memory", "refused", "crashed", "timed out"]

REQUEST, OUTPUT, RESULT = "trial.json", "output.txt", "result.json"
"""Files in the folder of a trial: what to train, the output of the process, and what no file of a run holds."""
ENDINGS: Mapping[int, TrialEnding] = {
    0: "completed",
    DoesNotFitError.exit_code: "out of memory",
    InputError.exit_code: "refused",
    PluginError.exit_code: "refused",
    DataError.exit_code: "refused",
}
"""Exit code of the process -> ending; "crashed" for all others."""
MEMORY_KINDS = {"cuda": "torch's allocator", "cpu": "resident memory of the process"}
"""Type of the device -> what `Outcome.peak_gib` counts."""
WARM_UP = 5  # one step of so many at the beginning is left out of the speed: caches fill, and kernels are chosen


class TrialProgress(Protocol):
    """The line that says what is planned or measured next (hwopt.report.status_line, above this layer)."""

    def show(self, text: str) -> None: ...
    def announce(self, text: str) -> None: ...


@dataclass(frozen=True)
class Variant:
    """What a trial trains, in the words of `hwopt run`."""

    name: str
    profile: str
    assignments: tuple[str, ...] = ()  # `key=value` texts as given to `--set`
    memory_limit: str | None = None
    without_dropout: bool = False
    """Train without dropout, so that the losses of two variants can be compared: another split draws other masks."""


@dataclass(frozen=True)
class Outcome:
    """How a trial ended, and what was measured. Without `ending == "completed"` there may be no windows."""

    ending: TrialEnding
    message: str = ""  # why it did not complete: the exact message of the error
    windows: Sequence[Window] = ()
    """One per step, in order, without the warm-up and without the last step, which the profiler observes."""
    losses: Mapping[int, float | None] = field(default_factory=dict)  # step -> training loss; None: not finite
    data_waits: Mapping[int, float] = field(default_factory=dict)
    """Step -> part of its time in which the loop waited for data."""
    steps_per_epoch: int | None = None
    peak_gib: float | None = None
    """Peak memory of training and of the largest evaluation batch; MEMORY_KINDS names the counter."""
    not_active: tuple[str, ...] = ()  # plugins whose evidence is not "active", each with its status and what was seen
    reduced_rows: int | None = None  # rows of the micro-batches after the planned ones ran out of memory; None: they fitted

    @property
    def completed(self) -> bool:
        return self.ending == "completed"

    def rate(self, unit: Unit) -> float | None:
        """Steps, samples or real tokens per second; None without windows."""
        return rate(self.windows, unit)

    @property
    def seconds_per_step(self) -> float | None:
        steps = self.rate("steps")
        return 1 / steps if steps else None

    @property
    def seconds_per_epoch(self) -> float | None:
        """Seconds of the training steps of an epoch, without evaluations and saves."""
        seconds, steps = self.seconds_per_step, self.steps_per_epoch
        return seconds * steps if seconds and steps else None


def run_trial(job: Path | None, variant: Variant, steps: int, folder: Path, limit_s: float, launch: Launch) -> Outcome:
    """Train `variant` of `job` (None: ./job.toml, else the embedded demo) for `steps` optimizer steps; returns the outcome.

    `folder` is created and gets the files of the trial; delete it afterwards. The process is killed after `limit_s` seconds,
    and if this process is interrupted. Never raises for what the variant does.
    """
    folder.mkdir(parents=True)
    request = asdict(variant) | {"job": None if job is None else str(job), "steps": steps, "trusted": trusted_models()}
    write_json(folder / REQUEST, request)
    code = launch(folder, limit_s)
    if code is None:
        return Outcome("timed out", f"no end after {limit_s:.0f} s")
    return outcome_of(folder, code, steps)


def outcome_of(folder: Path, exit_code: int, steps: int) -> Outcome:
    """The outcome of a trial whose process ended with `exit_code`, from the files in its `folder`."""
    recorded, message = read_status(folder)
    if recorded != exit_code:  # the process could not say it
        return Outcome("crashed", death_message(exit_code, folder / OUTPUT))
    ending = ENDINGS.get(exit_code, "crashed")
    if ending != "completed":
        return Outcome(ending, message)
    record = read_record(folder)
    windows = [window for window in record.windows if window.step < steps]
    return Outcome(
        "completed",
        windows=windows[len(windows) // WARM_UP :],
        losses={int(row["step"] or 0): row.get("loss") for row in record.log_rows},
        data_waits={int(row["step"] or 0): row.get("data_wait") or 0.0 for row in record.log_rows},
        steps_per_epoch=record.last.get("steps_per_epoch"),
        peak_gib=record.peak_gib,
        not_active=tuple("{name} {status}: {seen}".format(**each) for each in record.evidence if each["status"] != "active"),
        reduced_rows=read_object(folder / RESULT).get("reduced_rows"),
    )


def death_message(exit_code: int, output: Path) -> str:
    """How a process ended that wrote no status: its signal or exit code, and the last line of its output."""
    lines = output.read_text(encoding="utf-8", errors="replace").strip().splitlines() if output.is_file() else []
    said = f": {cut(printable(lines[-1]), 200)}" if lines else ""
    if exit_code == -9:
        return f"killed (SIGKILL); the system does this if the host is out of memory{said}"
    return f"{f'ended by signal {-exit_code}' if exit_code < 0 else f'exit code {exit_code}'}{said}"


def what_runs(plan: Plan) -> str:
    """What a run of `plan` does: equal texts for plans of one job of which only a reason or a fallback differs."""
    applied = {entry.name: entry.options.model_dump(mode="json") for entry in plan.applied()}
    for options in applied.values():
        options.pop("fallback", None)
    settings = plan.training.model_dump(mode="json"), plan.job.data.max_length
    return json.dumps([applied, asdict(plan.batch), *settings], sort_keys=True)


@contextmanager
def launching(device_type: str) -> Iterator[Launch]:
    """What starts trials on such a device: forks of one process on a CPU, which becomes new interpreters if that process ends."""
    if device_type != "cpu":
        yield in_new_process
        return
    with ForkServer(PROGRAM) as server:

        def launch(folder: Path, limit_s: float) -> int | None:
            try:
                reply = server.ask(str(folder.absolute()).encode(), limit_s)
            except ServerEnded:
                return in_new_process(folder, limit_s)
            return None if reply is None else reply.exit_code or int(reply.answer)

        yield launch


def in_new_process(folder: Path, limit_s: float) -> int | None:
    with open(folder / OUTPUT, "wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", START_UP, json.dumps(sys.path), str(folder), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches the command only, and the workers of the trial can be killed with it
        )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        kill_session(process.pid)
        process.wait()
