"""What reports print, for tests."""

import re
from collections.abc import Callable
from io import StringIO
from typing import Any

from hwopt.report.terminal import Terminal


def printed(show: Callable[[Terminal], Any], width: int | None = None) -> str:
    """What `show` prints into a pipe, or on a terminal of `width` columns, without colours and trailing spaces."""
    output = StringIO()
    if width is None:
        show(Terminal(file=output))
        return output.getvalue()
    show(Terminal(file=output, force_terminal=True, color_system=None, width=width))
    return re.sub(r" +$", "", output.getvalue(), flags=re.MULTILINE)
