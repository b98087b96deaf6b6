"""The hub of models and data sets: whether this machine reaches it, and its clients without a network."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock
from urllib.parse import urlsplit
from urllib.request import getproxies


def hub_is_out_of_reach() -> bool:
    """Whether the hub's host name cannot be resolved; its client would retry for half a minute."""
    hub = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co").hostname
    try:
        return not getproxies() and not socket.getaddrinfo(hub, None)
    except OSError:
        return True


@contextmanager
def offline_clients(offline: bool = True) -> Iterator[None]:
    """The hub's clients use their caches only, if `offline`. They read the environment when they are imported, not later."""
    with ExitStack() as stack:
        for name in ("huggingface_hub.constants", "datasets.config") if offline else ():
            if name in sys.modules:
                stack.enter_context(mock.patch.object(sys.modules[name], "HF_HUB_OFFLINE", True))
        yield
