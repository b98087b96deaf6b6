"""execute: train a plan in a run folder. However the run ends, the folder says how."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
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
from hwopt.export.accelerate import exports_of, refuse_contradictions
from hwopt.memory.advice import Advisor
from hwopt.memory.forecast import planner
from hwopt.memory.forecast.known_limits import record_limit
from hwopt.planning.plan import Plan, Replan
from hwopt.plugin.registry import Registry
from hwopt.records.run_files import FINAL, SUMMARY, completed_steps, read_object, status_code
from hwopt.runs.eval_rows import write_eval_rows
from hwopt.runs.folder import write_status
from hwopt.runs.journal import Journal
from hwopt.runs.rank_errors import report_error
from hwopt.runs.resume import AlreadyComplete, claim_run_folder
from hwopt.saving.best_model import best_metric
from hwopt.saving.reader import list_checkpoints
from hwopt.saving.writer import PLAN_FILES
from hwopt.system import signals
from hwopt.system.atomic_folder import MANIFEST
from hwopt.system.cache import cache_folder
from hwopt.system.ranks import rank_and_world
from hwopt.system.watchdog import SECOND_SIGNAL, Watchdog, kill_workers_and_local_ranks
from hwopt.tasks.base import Task
from hwopt.text import first_line
from hwopt.training.build import build
from hwopt.training.failure import report_oom, write_report
from hwopt.training.listener import DONE, Listener, Listeners, Summary
from hwopt.training.loop import train
from hwopt.training.optimizer import warn_without_rate
from hwopt.training.run import Run

LOCAL = (MANIFEST, *PLAN_FILES)  # files of `final/` that stay here: checksums, and what holds paths of this machine


def execute(
    plan: Plan,
    folder: Path,
    listener: Listener | None = None,
    *,
    cache: Path | None = None,
    replan: Replan | None = None,
    resume: bool | Path = False,
    fresh: bool = False,
    next_folder: Callable[[], Path] | None = None,
    task: Task | None = None,
) -> Summary:
    """Train `plan`, with everything that the run writes under `folder`. Returns the summary (Hugging Face's names).

    `resume`: resume from the newest valid checkpoint of `folder`, or from the checkpoint of that path. `fresh`: start over;
    the old run folder is kept beside it. `replan` returns the plan with further assignments; with it, a run that does not fit
    ends with the options that would save memory. `next_folder` returns another folder if a process took `folder` meanwhile.
    `task`: another one than that of the job.
    On several ranks every rank calls this; only rank 0 shows and writes. However it ends, `status.json` has the exit code.
    Raises FolderInUseError if another process trains in `folder`, InputError if `resume` names another run's checkpoint.
    """
    refuse_contradictions(os.environ, plan.recipe.accelerator, plan.hardware, exports_of(plan))
    with contextlib.ExitStack() as stack:
        stack.enter_context(signals.temporary_handlers())
        execution = Execution(plan, folder, cache or cache_folder(), listener, stack, task)
        try:
            return execution.run(resume, fresh, replan, next_folder)
        finally:
            if execution.own is not None:
                execution.listener.on_end(execution.own, execution.ending)


class Execution(Listener):
    """One call of `execute`: the run, once its folder is locked, and how it ended."""

    def __init__(
        self, plan: Plan, folder: Path, cache: Path, listener: Listener | None, stack: contextlib.ExitStack, task: Task | None
    ) -> None:
        self.plan, self.folder, self.cache, self.stack, self.task = plan, folder, cache, stack, task
        self.rank, _ = rank_and_world(os.environ)
        shown = [Journal(), *([listener] if listener else [])] if self.rank == 0 else []
        self.listener = Listeners(*shown, self)
        self.watchdog: Watchdog | None = None
        self.own: Run | None = None  # the run, once its folder is locked
        self.ending = ""  # how it ended, if this process has written it into the status

    def on_out_of_memory(self, run: Run, rows: int) -> None:
        """Remember which micro-batch size did not fit, so that the next plan does not choose it."""
        record_limit(run.plan, self.cache, rows)

    def watch(self, run: Run) -> None:
        """Prepare for a hang of `run`, which is built. From now on a second signal ends the process."""
        self.stack.enter_context(signals.before_forced_exit(self.leave))
        launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        first = run.step
        self.watchdog = Watchdog(run.training.hang_timeout, run.folder, run.rank, self.leave, launcher, lambda: run.step == first)

    def on_steps_begin(self, run: Run) -> None:
        if self.watchdog is not None:
            self.watchdog.__enter__()

    def on_steps_end(self, run: Run) -> None:
        if self.watchdog is not None:
            self.watchdog.__exit__(None, None, None)

    def on_heartbeat(self, run: Run) -> None:
        if self.watchdog is not None:
            self.watchdog.heartbeat()

    def leave(self, code: int, message: str = SECOND_SIGNAL) -> None:
        """Write how the process ends, and end the other processes of the run. The caller then ends this one."""
        self.set_status(code, message)
        text = f"error: {message}"
        if not report_error(code, text, killed_others=True):
            with contextlib.suppress(OSError):
                os.write(2, f"{text}\n".encode())
        kill_workers_and_local_ranks()

    def run(self, resume: bool | Path, fresh: bool, replan: Replan | None, next_folder: Callable[[], Path] | None) -> Summary:
        def claim(run: Run) -> None:
            best_metric(run.training, run.task, run.prepared, run.device)  # reports errors in the job before a folder is made
            claim_run_folder(run, self.stack, resume=resume, fresh=fresh, next_folder=next_folder)
            self.own = run
            warn_without_token(run)
            warn_without_rate(run)

        try:
            with (
                report_oom("the model", self.plan.batch_option("train")),
                build(self.plan, self.folder, self.cache, claim, self.listener, self.task) as run,
            ):
                self.watch(run)
                try:
                    summary = train(run)
                except DoesNotFitError as unfit:
                    if not unfit.secondhand:
                        write_report(run, str(unfit))
                    raise
            if self.rank == 0:
                write_eval_rows(run)
            if (code := signals.received()) is not None:  # while the end was written
                raise signals.exception_for(code)
            self.set_status(0, DONE)
            if run.training.push_to_hub and self.rank == 0:
                push_to_hub(run)
            self.ending = DONE
            return summary
        except AlreadyComplete as complete:
            steps = completed_steps(self.folder)
            complete.run.say(f"{self.folder} is complete, after step {steps:,}: see {self.folder / 'final'}")
            return read_object(self.folder / SUMMARY)
        except BaseException as raised:
            error = self.to_user_error(raised)
            written = self.record_outcome(error)
            if isinstance(error, DoesNotFitError) and replan is not None and self.rank == 0:
                # takes seconds, in which a launcher may end this rank: the exit code is written already
                error.args = (f"{error}{memory_advice(self.plan, replan, self.cache)}",)
                if written:
                    self.set_status(signals.exit_code(error), str(error))
            if error is not raised:
                raise error from raised
            raise

    def to_user_error(self, error: BaseException) -> BaseException:
        """What ended the run, as an error that says what to do and what is kept."""
        if not isinstance(error, HwoptError) and signals.received() is None:
            full = StorageError(f"{error}. Free some space, and resume with --resume") if is_disk_full(error) else None
            error = full or worker_death(error) or error
        own = self.own
        if own is not None and own.step and isinstance(error, NonFiniteError | WorkerDiedError | DoesNotFitError):
            kept = list_checkpoints(own.folder)
            error.args = (f"{error} {f'The newest checkpoint is {kept[0]}.' if kept else 'No checkpoint was saved yet.'}",)
        return placed(error, self.plan.place) if isinstance(error, InputError) else error

    def record_outcome(self, error: BaseException) -> bool:
        """Write into the status how the run ended, unless the rank at fault has written it. Returns whether it was written."""
        code = signals.exit_code(error)
        recorded = self.own is None or status_code(self.own.folder) is not None
        caused_elsewhere = self.rank > 0 and (isinstance(error, WorkerDiedError) or code in signals.EXIT_CODES.values())
        if recorded and (caused_elsewhere or (isinstance(error, HwoptError) and error.secondhand)):
            return False
        ending = self.ended_by_signal(code) or str(error) or type(error).__name__
        self.set_status(code, ending)
        self.ending = f"ended with exit code {code}: {ending}"
        return True

    def ended_by_signal(self, code: int) -> str:
        """What the status says of a signal; "" if none ended the run."""
        if code not in signals.EXIT_CODES.values():
            return ""
        own, done = self.own, "before the first step"
        if own is not None and own.step and completed_steps(own.folder) >= own.total_steps:
            done = "after the last step: final/ is complete"
        elif own is not None and own.step:
            saved = (own.folder / f"checkpoint-{own.step}").is_dir()  # the folder exists once it is complete
            done = f"after step {own.step:,}, {'saved' if saved else 'which could not be saved'}; resume with --resume"
        return f"{'interrupted' if code == signals.EXIT_CODES[SIGINT] else 'terminated'} {done}"

    def set_status(self, exit_code: int, message: str) -> None:
        """Write `status.json` if the folder is this run's. A storage error does not hide the error that ended the run."""
        if self.own is not None and (self.rank == 0 or exit_code) and self.own.folder.is_dir():
            with contextlib.suppress(StorageError):
                write_status(self.own.folder, exit_code, message)


def memory_advice(plan: Plan, replan: Replan, cache: Path) -> str:
    """The options that would save memory, with the planner's figures; "" if it cannot tell."""
    try:
        memory = planner.with_largest_sizes(plan, plan.memory or planner.plan_memory(plan, cache), cache)
        changes = Advisor(plan, memory, Registry(), replan, cache).with_changes().changes
    except HwoptError:
        return ""
    fields = {entry.name: plan.recipe.fields_of(entry.author) for entry in plan.entries}
    sizes = {name for name, written in fields.items() if written == ("batch",)}  # the back-off tried single rows already
    lines = [
        f"\n  {', '.join(change.lines)}: saves {change.saves_gib:.2f} GiB ({change.cost})"
        for change in changes
        if not any(assignment.split(".")[1] in sizes for assignment in change.assignments)
    ]
    return "\nPredicted to save memory, the least loss of speed first:" + "".join(lines) if lines else ""


def warn_without_token(run: Run) -> None:
    if not run.training.push_to_hub or not run.is_main:
        return
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        run.warn("training.push_to_hub: the hub cannot be reached (or HF_HUB_OFFLINE is set). The run will end without an upload")
    elif get_token() is None:
        run.warn("training.push_to_hub: not logged in to the hub. Run `hf auth login` before the run ends, or set HF_TOKEN")


def push_to_hub(run: Run) -> None:
    """Upload `final/` to the repository `training.hub_model_id`, which is created if needed. Only rank 0 calls it."""
    from huggingface_hub import HfApi

    name, folder = run.training.hub_model_id, run.folder / FINAL
    assert name is not None, "the job was validated"
    run.say(f"Uploading {folder} to {name}")
    try:
        hub = HfApi()
        address = hub.create_repo(name, private=run.training.hub_private_repo, exist_ok=True)
        message = "Upload the model of a run of hwopt"
        hub.upload_folder(repo_id=address.repo_id, folder_path=folder, commit_message=message, ignore_patterns=list(LOCAL))
        run.say(f"The model is on the hub: {address}")
    except Exception as error:  # the hub client, the network and the system each raise their own; the run is complete
        run.warn(
            f"{folder} was not uploaded to {name} ({type(error).__name__}: {first_line(error)}). The run is complete. "
            f"To upload it later: hf upload {name} {folder} . {' '.join(f'--exclude {file}' for file in LOCAL)}"
        )
