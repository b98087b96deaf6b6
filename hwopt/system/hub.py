"""The hub of models and data sets: whether this machine reaches it, and its clients without a network."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
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
    loaded: list[Any] = [sys.modules[name] for name in ("huggingface_hub.constants", "datasets.config") if name in sys.modules]
    before = [client.HF_HUB_OFFLINE for client in loaded]
    try:
        for client in loaded if offline else ():
            client.HF_HUB_OFFLINE = True
        yield
    finally:
        for client, value in zip(loaded, before, strict=True):
            client.HF_HUB_OFFLINE = value
