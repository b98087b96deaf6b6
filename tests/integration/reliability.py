"""Runs that tests disturb: forks of the test process, which are resumed and compared with an undisturbed run."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from integration.forks import forked_ranks, wait_for_exit
from integration.ranks_folder import RUN, write_job, write_profile

from hwopt.cli import run_command
from hwopt.saving import reader
from hwopt.system import atomic_folder
from hwopt.testing import TINY_BERT, logged, saved_bits


@dataclass
class Work:
    """A job of a few seconds in `folder`, the working folder of all its runs."""

    folder: Path
    last: int
    """The last step of a run."""
    ranks: int = 1

    def write(self, **training: Any) -> None:
        write_job(self.folder, TINY_BERT | {"hidden_dropout_prob": 0.1}, max_steps=self.last, **training)
        write_profile(self.folder)

    def run(self, name: str) -> Path:
        return self.folder / "runs" / name

    def started(
        self, name: str, *arguments: str, ranks: int | None = None, disturb: Callable[[], None] = lambda: None
    ) -> list[int]:
        """Start or resume the run `name` in child processes. Returns the pids of its ranks. Each calls `disturb` first."""
        resume_option = [] if "--resume-from" in arguments else ["--resume"]
        command = [*RUN, *resume_option, "--name", name, *arguments]

        def work(rank: int) -> None:
            disturb()
            os._exit(run_command(command))

        return forked_ranks(work, ranks or self.ranks, self.folder)

    def codes(self, name: str, *arguments: str, **options: Any) -> list[int]:
        """The exit codes of the ranks of a run."""
        return [wait_for_exit(pid) for pid in self.started(name, *arguments, **options)]

    def finish(self, name: str, *arguments: str, **options: Any) -> Path:
        """Start or resume the run `name` and let it end. Returns its folder."""
        assert set(self.codes(name, *arguments, **options)) == {0}
        return self.run(name)

    def bits(self, run: Path) -> dict[str, str]:
        """Hashes of the final weights, the final optimizer state and the best weights."""
        assert atomic_folder.find_corruption(run / "final") == ""
        last = reader.list_checkpoints(run)[0]
        assert last.name == f"checkpoint-{self.last}"
        return {f"{part.name}/{name}": value for part in (last, run / "final") for name, value in saved_bits(part).items()}

    def resumes_exactly(self, name: str, undisturbed: Path, saved_alone: bool = False) -> None:
        """Resume the run and compare it with `undisturbed`, without the losses if a rank saved alone (`saved_alone`)."""
        run = self.finish(name)
        assert self.bits(run) == self.bits(undisturbed)
        assert logged(run, "step") == logged(undisturbed, "step")
        for key in () if saved_alone else ("loss", "eval_loss"):
            assert logged(run, key) == logged(undisturbed, key)
        shutil.rmtree(run)


def status(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "status.json").read_text())
    return found


def step_of(run: Path) -> int:
    """The last logged step; 0 without a log."""
    with contextlib.suppress(OSError):
        return max((int(step) for step in logged(run, "step")), default=0)
    return 0


def newest_valid_step(run: Path) -> int:
    """The step of the checkpoint that a run would resume from; 0 without one."""
    found = reader.latest_valid(run, lambda message: None)
    return 0 if found is None else found.step
