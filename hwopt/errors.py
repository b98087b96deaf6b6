"""The exception tree: one branch an exit code (docs/exit-codes.md lists them).

`raise` one of these for what a user can mend; `assert` for what only a programmer can.
A message has three beats: what is wrong and where, what is accepted (with the nearest valid name), what to do next.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable


class HwoptError(Exception):
    """Anything that ends a run with a message instead of a traceback."""

    exit_code = 1
    secondhand = False
    """Whether another rank is at fault, whose own message says more."""


class InputError(HwoptError):
    """The command line, a profile, a job, an environment variable or a run name is not usable."""

    exit_code = 2


class PluginError(HwoptError):
    """A plugin cannot be imported, breaks its contract or contradicts another one."""

    exit_code = 3


class DataError(HwoptError):
    """A data file cannot be read, lacks a column or holds samples that cannot be trained on."""

    exit_code = 4


class NonFiniteError(HwoptError):
    """A loss or gradient is not finite, or the run diverged."""

    exit_code = 5


class StorageError(HwoptError):
    """Something could not be written or read back whole."""

    exit_code = 6


class DoesNotFitError(HwoptError):
    """The run does not fit into the device's memory."""

    exit_code = 7


class FolderInUseError(HwoptError):
    """Another process trains in the run folder."""

    exit_code = 8


class WorkerDiedError(HwoptError):
    """A data-loading worker or another rank died."""

    exit_code = 9


DEATHS = {
    r"DataLoader worker .*(exited unexpectedly|is killed by signal)": (
        "a data-loading worker died: {0}. Try plugins.dataloader.workers = 0"
    ),
    r"/gloo/|Connection (closed|reset) by peer": "another rank is gone, its own output says why ({0})",
}
"""What RuntimeErrors say of them. torch raises the first from a signal handler, wherever the process stands, and again."""


def worker_death(error: BaseException) -> WorkerDiedError | None:
    """What `error` says of a worker or rank that is gone, itself or because of what it was raised behind."""
    for each in chain_of(error):
        if type(each) is RuntimeError:
            for pattern, message in DEATHS.items():
                if re.search(pattern, str(each)):
                    return WorkerDiedError(message.format(str(each).strip().removesuffix(".")))
    return None


def chain_of(error: BaseException) -> list[BaseException]:
    """`error`, and what it was raised from or behind."""
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__context__
    return chain


def exit_code_of(error: BaseException) -> int:
    """The code of docs/exit-codes.md for a process that ends by `error`.

    A signal counts more than what fails because of it: workers that die with the process, say.
    """
    for each in chain_of(error):
        if isinstance(each, KeyboardInterrupt):
            return 130
        if isinstance(each, SystemExit) and each.code in (130, 143):  # of a signal; any other would end a run as if it were done
            return int(each.code)
    if isinstance(error, HwoptError):
        return error.exit_code
    if is_disk_full(error):
        return StorageError.exit_code
    return 1 if worker_death(error) is None else WorkerDiedError.exit_code


def is_disk_full(error: BaseException) -> bool:
    """Whether it says that a disk, or what one may have of it, is full: as Python, or as a package written in Rust has it."""
    full = (errno.ENOSPC, errno.EDQUOT)
    return isinstance(error, Exception) and (
        getattr(error, "errno", None) in full or any(f"(os error {number})" in str(error) for number in full)
    )


def is_gated(error: BaseException) -> bool:
    """Whether the hub refuses a model or data set until its terms are accepted."""
    said = f"{type(error).__name__}: {error}"  # of transformers, datasets or the client, which may quote paths with any number
    return (
        re.search(r"GatedRepo|\bgated (repo|dataset)|\b40[13] (client|unauthorized|forbidden)", said, re.IGNORECASE) is not None
    )


class Problems:
    """Collects every problem of one input, so that a user mends a file once instead of line by line."""

    LIMIT = 10
    """That are said in full."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.more = 0

    def add(self, message: str | Callable[[], str]) -> None:
        """A message, or what makes it: only those that will be read are made."""
        if len(self.messages) < self.LIMIT:
            self.messages.append(message if isinstance(message, str) else message())
        else:
            self.more += 1

    def raise_if_any(self, error: type[HwoptError] = InputError) -> None:
        """Raise `error` with all messages, one a line, the first of them in full."""
        if self.messages:
            raise error("\n".join([*self.messages, *([f"… and {self.more} more"] if self.more else [])]))
