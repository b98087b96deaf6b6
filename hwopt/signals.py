"""SIGINT and SIGTERM: which one came, whatever became of the exception that it raised.

Python swallows what a handler raises inside a callback (while a data-loading worker is forked, say), and a signal to the whole
group also kills the workers, whose death then looks like the cause.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType

EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}

_received: list[int] = []


def listen() -> None:
    """End the process by KeyboardInterrupt or SystemExit at either signal, and remember the first."""
    for number in EXIT_CODES:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)
    _received.clear()


def received() -> int | None:
    """The exit code of the first signal since `listen`; None where none came."""
    return EXIT_CODES[signal.Signals(_received[0])] if _received else None


def _end(number: int, frame: FrameType | None) -> None:
    _received.append(number)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(EXIT_CODES[signal.Signals(number)])
