"""The exception tree: one class per exit code (docs/exit-codes.md lists them).

`raise` one of these for a problem that a user can fix; `assert` for a mistake of a programmer.
A message has three parts: the problem and its place, what is accepted (with the nearest valid name), the next thing to do.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable


class HwoptError(Exception):
    """Base class of errors that end a run with a message instead of a traceback."""

    exit_code = 1
    secondhand = False
    """True if another rank failed first; the message of that rank names the cause."""


class InputError(HwoptError):
    """The command line, a profile, a job, an environment variable or a run name is invalid."""

    exit_code = 2


class PluginError(HwoptError):
    """A plugin cannot be imported, breaks its contract or conflicts with another plugin."""

    exit_code = 3


class DataError(HwoptError):
    """A data file cannot be read, lacks a column or has samples that cannot be used for training."""

    exit_code = 4


class NonFiniteError(HwoptError):
    """A loss or gradient is not finite, or the run diverged."""

    exit_code = 5


class StorageError(HwoptError):
    """A file could not be written, or a saved file is corrupt."""

    exit_code = 6


class DoesNotFitError(HwoptError):
    """The run does not fit into the device's memory."""

    exit_code = 7


class FolderInUseError(HwoptError):
    """Another process is training in the run folder."""

    exit_code = 8


class WorkerDiedError(HwoptError):
    """A data-loading worker or another rank died."""

    exit_code = 9


WORKER_DEATHS = {
    r"DataLoader worker .*(exited unexpectedly|is killed by signal)": (
        "a data-loading worker died: {0}. Try num_workers = 0 for the data loader"
    ),
    r"/gloo/|Connection (closed|reset) by peer": "another rank exited: see its output for the cause ({0})",
}
"""Pattern of a RuntimeError's text -> message. torch raises the first one from a signal handler, at any line of the program."""


def worker_death(error: BaseException) -> WorkerDiedError | None:
    """The WorkerDiedError that `error`, or an error in its chain, stands for; None if no worker or rank died."""
    for each in exception_chain(error):
        if type(each) is RuntimeError:
            for pattern, message in WORKER_DEATHS.items():
                if re.search(pattern, str(each)):
                    return WorkerDiedError(message.format(str(each).strip().removesuffix(".")))
    return None


def exception_chain(error: BaseException) -> list[BaseException]:
    """`error` and its `__context__` chain, newest first."""
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__context__
    return chain


def exit_code_of(error: BaseException) -> int:
    """The exit code (docs/exit-codes.md) of a process that ends with `error`.

    A signal in the chain takes precedence, because it causes later errors such as dead workers.
    """
    for each in exception_chain(error):
        if isinstance(each, KeyboardInterrupt):
            return 130
        if isinstance(each, SystemExit) and each.code in (130, 143):  # a signal; other codes come from plugins
            return int(each.code)
    if isinstance(error, HwoptError):
        return error.exit_code
    if is_disk_full(error):
        return StorageError.exit_code
    return 1 if worker_death(error) is None else WorkerDiedError.exit_code


def is_disk_full(error: BaseException) -> bool:
    """Whether `error` reports a full disk or an exhausted quota, by `errno` or by the text of a package written in Rust."""
    full = (errno.ENOSPC, errno.EDQUOT)
    return isinstance(error, Exception) and (
        getattr(error, "errno", None) in full or any(f"(os error {number})" in str(error) for number in full)
    )


def is_gated(error: BaseException) -> bool:
    """Whether the hub denies access to a model or data set until the user accepts its terms."""
    text = f"{type(error).__name__}: {error}"  # transformers, datasets and the hub client each have their own classes
    return (
        re.search(r"GatedRepo|\bgated (repo|dataset)|\b40[13] (client|unauthorized|forbidden)", text, re.IGNORECASE) is not None
    )


class Problems:
    """Collects all problems of one input, so that a user can fix a file in one pass."""

    LIMIT = 10
    """Number of problems that are shown in full."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.omitted = 0

    def add(self, message: str | Callable[[], str]) -> None:
        """Add a message, or a function that makes it; the function is called only if the message will be shown."""
        if len(self.messages) < self.LIMIT:
            self.messages.append(message if isinstance(message, str) else message())
        else:
            self.omitted += 1

    def raise_if_any(self, error: type[HwoptError] = InputError) -> None:
        """Raise `error` with the messages, one per line, if there are any."""
        if self.messages:
            raise error("\n".join([*self.messages, *([f"… and {self.omitted} more"] if self.omitted else [])]))
