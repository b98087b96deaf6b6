"""Trackers: a run's metrics, settings and evidence for TensorBoard, Weights & Biases, MLflow and the others of Accelerate.

`--report-to NAME` takes a tracker of Accelerate, or a listener that a package registers in the entry-point group
`hwopt.listeners` (name -> a subclass of Listener, called without arguments).
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any

from hwopt.errors import InputError
from hwopt.text import listing, nearest
from hwopt.training.listener import Listener, Row, Summary

if TYPE_CHECKING:
    from hwopt.training.run import Run

GROUP = "hwopt.listeners"


def listeners_for(names: Sequence[str]) -> list[Listener]:
    """The listeners called `names`. Raises InputError for an unknown name, or if the tracker's package is not installed."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    own = {entry.name: entry for entry in metadata.entry_points(group=GROUP)}
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
    where = f"--report-to {entry.name}: {entry.value} of {entry.dist.name if entry.dist else 'an unknown package'}"
    try:
        listener = entry.load()()
    except Exception as error:
        raise InputError(f"{where} raised {type(error).__name__}: {error}") from error
    if not isinstance(listener, Listener):
        raise InputError(f"{where} is no hwopt.training.listener.Listener")
    return listener


class Tracker(Listener):
    """One tracker of Accelerate. Logs into `<run folder>/<name>/`, if the tracker writes files."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.tracker: Any = None

    def on_start(self, run: Run) -> None:
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        cls = LOGGER_TYPE_TO_CLASS[self.name]
        folder = {"logging_dir": str(run.folder / self.name)} if cls.requires_logging_directory else {}
        self.tracker = cls(run.folder.name, **folder)
        self.tracker.start()
        plan = run.plan
        settings = plan.settings | {"profile": plan.profile.name, "hardware": plan.hardware.name}
        settings["model"] = plan.model.architecture
        self.tracker.store_init_configuration({key: plain(value) for key, value in settings.items()})

    def on_evidence(self, run: Run, found: list[Any]) -> None:
        lines = [f"{entry.name}: {evidence.status}: {evidence.seen}" for entry, evidence in found]
        if self.name == "tensorboard":
            self.tracker.log({"evidence": "\n".join(lines)}, step=run.step)
        else:  # the others take numbers as metrics, and texts as settings
            self.tracker.store_init_configuration({f"evidence/{line.split(': ')[0]}": line for line in lines})

    def on_log(self, run: Run, row: Row) -> None:
        prefixes = {"eval": "eval/", "test": "test/"}
        values = {}
        for key, value in row.items():
            first, _, rest = key.partition("_")
            values[f"{prefixes[first]}{rest}" if first in prefixes else f"train/{key}"] = value
        self.tracker.log(values, step=int(row["step"]))

    def on_finish(self, run: Run, summary: Summary) -> None:
        self.tracker.finish()


def plain(value: Any) -> bool | int | float | str:
    """`value` in a type that every tracker stores."""
    return value if isinstance(value, bool | int | float | str) else str(value)
