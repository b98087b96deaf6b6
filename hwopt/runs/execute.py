"""execute: a plan is trained in a folder of its own, and however that ends, the folder says how."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from signal import SIGINT

from hwopt.config.job import placed
from hwopt.errors import (
    DoesNotFitError,
    HwoptError,
    InputError,
    NonFiniteError,
    StorageError,
    WorkerDiedError,
    is_disk_full,
    worker_death,
)
from hwopt.interop.accelerate import exports_of
from hwopt.interop.launcher_environment import refuse_contradictions
from hwopt.memory import planner
from hwopt.memory.advice import advised
from hwopt.memory.tracer import only_sizes
from hwopt.planning.plan import Plan
from hwopt.plugin.registry import Registry
from hwopt.runs.journal import Journal
from hwopt.runs.launch import leave_note
from hwopt.runs.resume import Complete, claim_run_folder
from hwopt.runs.status import status_code, steps_done, summary_of, write_status
from hwopt.saving.best_model import best_metric
from hwopt.saving.reader import checkpoint_folder, in_folder
from hwopt.system import signals
from hwopt.system.cache import cache_folder
from hwopt.system.ranks import rank_and_world
from hwopt.system.watchdog import Watchdog, end_the_others
from hwopt.training.build import build
from hwopt.training.listener import Listener, Listeners, Row
from hwopt.training.loop import report_oom, train
from hwopt.training.oom_report import write_report
from hwopt.training.run import Run


def execute(
    plan: Plan,
    folder: Path,
    listener: Listener | None = None,
    *,
    cache: Path | None = None,
    replan: Callable[[Sequence[str]], Plan] | None = None,
    resume: bool | Path = False,
    fresh: bool = False,
) -> Row:
    """Train `plan`, with everything that the run writes under `folder`. Returns the summary (Hugging Face's names).

    `resume`: go on from the newest whole checkpoint of `folder`, or from the checkpoint of that path. `fresh`: begin anew where
    there was a run, which is kept beside it. `replan` gives the plan with further assignments; with it, a run that does not fit
    ends with the lines that would save memory.
    On several ranks every rank calls this; only rank 0 hears and writes. However it ends, `status.json` has the exit code.
    Raises FolderInUseError where another process trains in `folder`, InputError where `resume` is another run's.
    """
    refuse_contradictions(os.environ, plan.recipe.accelerator, plan.hardware, exports_of(plan))
    rank, _ = rank_and_world(os.environ)
    heard = Listeners(Journal(), *([listener] if listener else [])) if rank == 0 else Listener()
    with contextlib.ExitStack() as stack:
        stack.enter_context(signals.listening())
        own: list[Run] = []  # once its folder is its own

        def claim_folder(run: Run) -> None:
            run.warn, run.say = partial(heard.warned, run), partial(heard.said, run)
            best_metric(run)  # what is wrong with the job is said before a folder is made
            claim_run_folder(run, stack, resume=resume, fresh=fresh)
            own.append(run)

        try:
            with (
                report_oom("the model", "plugins.batch.train"),
                build(plan, folder, cache or cache_folder(), claim_folder) as run,
            ):
                run.ran_out = partial(planner.held, plan, cache or cache_folder())
                watch = watching(run, stack)
                run.watch, run.heartbeat = watch, watch.heartbeat
                with reporting(run):
                    summary = train(run, heard)
            if (code := signals.received()) is not None:  # while the end was written
                raise signals.ending(code)
            set_status(own, rank, 0, "done")
            return summary
        except Complete as complete:
            heard.said(complete.run, f"{folder} is complete, after step {steps_done(folder):,}: see {folder / 'final'}")
            return summary_of(folder)
        except BaseException as raised:
            error = to_user_error(raised, own)
            if isinstance(error, InputError):
                error = placed(error, plan.place)
            written = record_outcome(error, own, rank)
            if isinstance(error, DoesNotFitError) and replan is not None and rank == 0:
                # takes seconds, in which a launcher may end this rank: the code is written already
                error.args = (f"{error}{advice(plan, replan, cache or cache_folder())}",)
                if written:
                    set_status(own, rank, signals.exit_code(error), str(error))
            if error is not raised:
                raise error from raised
            raise


def to_user_error(error: BaseException, own: Sequence[Run]) -> BaseException:
    """What has ended the run, as an error that says what to do and what is kept."""
    if not isinstance(error, HwoptError) and signals.received() is None:
        full = StorageError(f"{error}. Free some space, and go on with --resume") if is_disk_full(error) else None
        error = full or worker_death(error) or error
    if own and own[0].step and isinstance(error, NonFiniteError | WorkerDiedError | DoesNotFitError):
        kept = in_folder(own[0].folder)
        error.args = (f"{error} {f'The newest checkpoint is {kept[0]}.' if kept else 'Nothing has been saved yet.'}",)
    return error


def record_outcome(error: BaseException, own: Sequence[Run], rank: int) -> bool:
    """Write how the run ends into its status, but where the rank at fault has said so better. Whether it was written."""
    code = signals.exit_code(error)
    told = bool(own) and status_code(own[0].folder) is not None
    hears_of_it = rank > 0 and (isinstance(error, WorkerDiedError) or code in signals.EXIT_CODES.values())
    secondhand = isinstance(error, HwoptError) and error.secondhand
    if (secondhand and (told or not own)) or (hears_of_it and told):
        return False
    set_status(own, rank, code, ended_by_signal(own, code) or str(error) or type(error).__name__)
    return True


def watching(run: Run, stack: contextlib.ExitStack) -> Watchdog:
    """What ends a run that hangs, or that a second signal ends: with its exit code everywhere, and nobody left behind."""

    def leave(code: int, message: str = "ended at once, by a second signal") -> None:
        set_status([run], run.rank, code, message)
        text = f"error: {message}"
        if not leave_note(code, text, secondhand=False, kills=True):
            with contextlib.suppress(OSError):
                os.write(2, f"{text}\n".encode())
        end_the_others()

    stack.enter_context(signals.leaving(leave))
    launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
    began = run.step
    return Watchdog(run.training.hang_timeout, run.folder, run.rank, leave, launcher, lambda: run.step == began)


@contextlib.contextmanager
def reporting(run: Run) -> Iterator[None]:
    """A run that did not fit leaves a report behind."""
    try:
        yield
    except DoesNotFitError as error:
        if not error.secondhand:
            write_report(run, str(error))
        raise


def advice(plan: Plan, replan: Callable[[Sequence[str]], Plan], cache: Path) -> str:
    """The lines that would save memory, with what the planner says they save; "" where it cannot tell."""
    try:
        memory = plan.memory or planner.plan_memory(plan, cache)
        changes = advised(plan, memory, Registry(), replan, cache).changes
    except HwoptError:
        return ""
    sizes = {entry.name for entry in plan.entries if only_sizes(plan, entry.author)}  # the backoff has been at single rows
    lines = [
        f"\n  {', '.join(change.lines)}: saves {change.saves_gib:.2f} GiB ({change.cost})"
        for change in changes
        if not any(assignment.split(".")[1] in sizes for assignment in change.assignments)
    ]
    return "\nPredicted to save memory, the least loss of speed first:" + "".join(lines) if lines else ""


def ended_by_signal(own: Sequence[Run], code: int) -> str:
    """What the status says of it; "" where it was none."""
    if code not in signals.EXIT_CODES.values():
        return ""
    done = "before the first step"
    if own and own[0].step and steps_done(own[0].folder) >= own[0].total_steps:
        done = "after the last step: final/ is whole"
    elif own and own[0].step:
        saved = checkpoint_folder(own[0].folder, own[0].step).is_dir()  # it is there once it is whole
        done = f"after step {own[0].step:,}, {'saved' if saved else 'which could not be saved'}; go on with --resume"
    return f"{'interrupted' if code == signals.EXIT_CODES[SIGINT] else 'terminated'} {done}"


def set_status(own: Sequence[Run], rank: int, exit_code: int, message: str) -> None:
    """Only in a run folder that is this run's; never hides the error that ended the run behind one of storage."""
    if own and (rank == 0 or exit_code) and own[0].folder.is_dir():
        with contextlib.suppress(StorageError):
            write_status(own[0].folder, exit_code, message)
