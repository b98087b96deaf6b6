"""A headless Chromium that draws a local page and tells what it did, through the DevTools protocol over a pipe.

`CHROMIUM` is the program, or None. Protocol: https://chromedevtools.github.io/devtools-protocol/.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CHROMIUM = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)
ARGUMENTS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--remote-debugging-pipe")


@dataclass
class Browser:
    """One open page."""

    commands: int
    """File descriptor that takes commands."""
    answers: int
    session: str = ""
    number: int = 0
    buffer: bytes = b""
    requested: list[str] = field(default_factory=list)
    """The addresses that the page asked for, the page included."""
    errors: list[str] = field(default_factory=list)
    """What the page wrote to the console, and what the browser reported about it."""

    def send(self, method: str, **parameters: Any) -> Any:
        """The result of a command."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.read()
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return answer["result"]

    def wait_for(self, event: str) -> None:
        while self.read().get("method") != event:
            pass

    def read(self) -> Any:
        """The next message, after noting requests and errors."""
        while b"\0" not in self.buffer:
            part = os.read(self.answers, 1 << 16)
            assert part, "the browser ended"
            self.buffer += part
        line, _, self.buffer = self.buffer.partition(b"\0")
        message = json.loads(line)
        parameters = message.get("params", {})
        match message.get("method"):
            case "Network.requestWillBeSent":
                self.requested.append(parameters["request"]["url"])
            case "Log.entryAdded":
                self.errors.append(parameters["entry"]["text"])
            case "Runtime.consoleAPICalled" | "Runtime.exceptionThrown":
                self.errors.append(json.dumps(parameters))
        return message

    def open(self, page: Path, *, width: int, dark: bool) -> None:
        """Load `page` in a window of `width` pixels, in the light or the dark theme."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])
        self.send("Page.navigate", url=page.absolute().as_uri())
        self.wait_for("Page.loadEventFired")

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression, as JSON."""
        found = self.send("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """Write the whole page as a PNG."""
        found = self.send("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def press(self, key: str, code: int) -> None:
        """Press a key, such as ("Tab", 9)."""
        text = {"text": "\r"} if key == "Enter" else {}
        for kind, more in (("keyDown", text), ("keyUp", {})):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **more)

    def accessible(self) -> list[tuple[str, str]]:
        """(role, name) of each node that a screen reader announces."""
        nodes = self.send("Accessibility.getFullAXTree")["nodes"]
        return [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if not node["ignored"]]


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser with one empty page, whose profile is in the folder `profile`."""
    assert CHROMIUM is not None
    command_read, command_write = os.pipe()
    answer_read, answer_write = os.pipe()

    child = (command_read, answer_write)
    wiring = f'exec 103<&{child[0]} 104>&{child[1]} 3<&103 4>&104 103<&- 104>&-; exec "$@"'  # the browser takes 3 and 4
    program = ["bash", "-c", wiring, "bash", CHROMIUM, *ARGUMENTS, f"--user-data-dir={profile}"]
    process = subprocess.Popen(program, pass_fds=child, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for descriptor in child:
        os.close(descriptor)
    try:
        opened = Browser(command_write, answer_read)
        target = opened.send("Target.createTarget", url="about:blank")["targetId"]
        opened.session = opened.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log", "Accessibility"):
            opened.send(f"{domain}.enable")
        yield opened
    finally:
        process.kill()
        process.wait()
        os.close(command_write)
        os.close(answer_read)
