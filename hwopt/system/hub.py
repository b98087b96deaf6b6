"""The hub of models and data sets: whether this machine reaches it, and its clients without a network."""

from __future__ import annotations

import os
import socket
import sys
from urllib.parse import urlsplit
from urllib.request import getproxies


def hub_is_out_of_reach() -> bool:
    """Whether the hub's host name cannot be resolved; its client would retry for half a minute."""
    hub = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co").hostname
    try:
        return not getproxies() and not socket.getaddrinfo(hub, None)
    except OSError:
        return True


def work_offline() -> None:
    """Set the hub's clients to use their caches only. They read the environment when they are imported."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    for name in ("huggingface_hub.constants", "datasets.config"):
        if (client := sys.modules.get(name)) is not None and os.environ["HF_HUB_OFFLINE"] == "1":
            client.HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
