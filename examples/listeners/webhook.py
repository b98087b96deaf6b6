"""A listener that posts the end of a run, and each warning, to a chat's webhook (Slack, Mattermost, Discord and others).

Register it in a package's pyproject.toml, then start a run with `--report-to webhook`:

    [project.entry-points."hwopt.listeners"]
    webhook = "my_package.webhook:Webhook"

HWOPT_WEBHOOK holds the address. A chat that does not answer never ends a run.
"""

import json
import os
import urllib.request
from contextlib import suppress

from hwopt.training.listener import Listener


class Webhook(Listener):
    def __init__(self) -> None:
        self.address = os.environ["HWOPT_WEBHOOK"]

    def post(self, text: str) -> None:
        body = json.dumps({"text": text}).encode()
        request = urllib.request.Request(self.address, body, {"Content-Type": "application/json"})
        with suppress(OSError):
            urllib.request.urlopen(request, timeout=10).close()

    def on_warning(self, run, message: str) -> None:
        self.post(f"{run.folder.name}: {message}")

    def on_finish(self, run, summary: dict) -> None:
        numbers = {key: value for key, value in summary.items() if isinstance(value, float)}  # it also has tables
        metrics = ", ".join(f"{key} {value:.4f}" for key, value in numbers.items() if key.startswith(("eval_", "test_")))
        self.post(f"{run.folder.name} is done after {summary['step']:,} steps: {metrics}")
