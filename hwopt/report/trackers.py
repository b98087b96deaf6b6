"""Trackers: a run's metrics, settings and evidence for TensorBoard, Weights & Biases, MLflow and the others of Accelerate.

`--report-to NAME` takes a tracker of Accelerate, or a listener that a package registers in the entry-point group
`hwopt.listeners` (name -> a subclass of Listener, called without arguments).
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any

from hwopt.config.entry_points import by_name, distribution_of
from hwopt.config.toml import leaves
from hwopt.errors import InputError
from hwopt.text import first_line, listing, nearest
from hwopt.training.listener import Listener, Row, Summary

if TYPE_CHECKING:
    from hwopt.training.run import Run

GROUP = "hwopt.listeners"


def listeners_for(names: Sequence[str]) -> list[Listener]:
    """The listeners called `names`. Raises InputError for an unknown name, or if the tracker's package is not installed."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    own = by_name(metadata.entry_points(group=GROUP), "listener")
    installed = {str(getattr(name, "value", name)) for name in get_available_trackers()}
    found: list[Listener] = []
    for name in dict.fromkeys(names):
        if name in own:
            found.append(load_listener(own[name]))
        elif name not in LOGGER_TYPE_TO_CLASS:
            known = sorted({*LOGGER_TYPE_TO_CLASS, *own})
            raise InputError(f"--report-to {name}: no such tracker.{nearest(name, known)} It is one of: {listing(known)}")
        elif name not in installed:
            raise InputError(f"--report-to {name}: its package is not installed. Install it: pip install {name}")
        else:
            found.append(Tracker(name))
    return found


def load_listener(entry: metadata.EntryPoint) -> Listener:
    """The listener of an entry point. Raises InputError, with the distribution, if it cannot be made."""
    where = f"--report-to {entry.name}: {entry.value} of {distribution_of(entry)}"
    try:
        listener = entry.load()()
    except Exception as error:
        raise InputError(f"{where} raised {type(error).__name__}: {error}") from error
    if not isinstance(listener, Listener):
        raise InputError(f"{where} is not a hwopt.training.listener.Listener")
    return listener


class Tracker(Listener):
    """One tracker of Accelerate. Logs into `<run folder>/<name>/`, if the tracker writes files.

    A tracker that cannot be started is bad input. One that fails later, such as without a network, ends with a warning.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.tracker: Any = None

    def on_start(self, run: Run) -> None:
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        cls, plan = LOGGER_TYPE_TO_CLASS[self.name], run.plan
        folder = {"logging_dir": str(run.folder / self.name)} if cls.requires_logging_directory else {}
        names = {"profile": plan.profile.name, "hardware": plan.hardware.name, "model": plan.model.architecture}
        try:
            self.tracker = cls(run.folder.name, **folder)
            self.tracker.start()
            found = (plan.settings | names).items()  # every tracker stores numbers and texts
            self.tracker.store_init_configuration({k: v if isinstance(v, int | float | str) else str(v) for k, v in found})
        except Exception as error:  # each tracker raises its own: no key, no server
            raise InputError(f"--report-to {self.name}: {type(error).__name__}: {first_line(error)}") from error

    def on_evidence(self, run: Run, found: list[Any]) -> None:
        lines = [f"{entry.name}: {evidence.status}: {evidence.seen}" for entry, evidence in found]
        if self.name == "tensorboard":
            self.send(run, "log", {"evidence": "\n".join(lines)}, step=run.step)
        else:  # the others take numbers as metrics, and texts as settings
            self.send(run, "store_init_configuration", {f"evidence/{line.split(': ')[0]}": line for line in lines})

    def on_log(self, run: Run, row: Row) -> None:
        values = {}
        for path, value in leaves(row):
            key = "/".join(path)
            first, _, rest = key.partition("_")
            values[f"{first}/{rest}" if first in ("eval", "test") else f"train/{key}"] = value
        self.send(run, "log", values, step=int(row["step"]))

    def on_finish(self, run: Run, summary: Summary) -> None:
        self.send(run, "finish")

    def send(self, run: Run, method: str, *arguments: Any, **options: Any) -> None:
        """Call a method of the tracker. If it fails, warn, and send nothing more."""
        if self.tracker is None:
            return
        try:
            getattr(self.tracker, method)(*arguments, **options)
        except Exception as error:
            self.tracker = None
            run.warn(f"The tracker {self.name} failed ({first_line(error)}) and gets nothing more; the run continues")
