"""HangWatch: the run's listener that runs the watchdog while steps are done, and ends a process that hangs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from hwopt.runs.rank_errors import report_error
from hwopt.system import signals
from hwopt.system.watchdog import SECOND_SIGNAL, Watchdog, kill_workers_and_local_ranks
from hwopt.training.listener import Listener
from hwopt.training.run import Run


class HangWatch(Listener):
    """Ends a hanging run, or one that a second signal ends, with its exit code on every rank and no process left."""

    def __init__(self, stack: contextlib.ExitStack, set_status: Callable[[int, str], None]) -> None:
        """`stack` closes with the run; `set_status(exit code, message)` writes the run's status."""
        self.stack, self.set_status = stack, set_status
        self.watchdog: Watchdog | None = None

    def watch(self, run: Run) -> None:
        """Prepare for `run`, which is built. From now on a second signal ends the process."""
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
