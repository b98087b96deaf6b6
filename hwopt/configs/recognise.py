"""Which tool a configuration file belongs to, by its keys, and its view."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hwopt.configs.readers import axolotl, hwopt_files, launchers, llama_factory, trainer
from hwopt.configs.source_file import SourceFile, read_source
from hwopt.configs.view import TOOL_NAMES, Tool, View
from hwopt.errors import InputError
from hwopt.planning.inputs import Inputs
from hwopt.text import listing


@dataclass(frozen=True)
class Reader:
    tool: Tool
    keys: frozenset[str]
    """Keys of the outermost table that the tool has."""
    telling: frozenset[str]
    """Of these, the ones that no other tool has. One of them decides."""
    read: Callable[[SourceFile, str], View]


READERS = (
    Reader("deepspeed", launchers.DEEPSPEED_SIGNATURE, launchers.DEEPSPEED_TELLING, launchers.read_deepspeed),
    Reader("accelerate", launchers.ACCELERATE_SIGNATURE, launchers.ACCELERATE_TELLING, launchers.read_accelerate),
    Reader("axolotl", axolotl.SIGNATURE, axolotl.TELLING, axolotl.read),
    Reader("llama-factory", llama_factory.SIGNATURE, llama_factory.TELLING, llama_factory.read),
)
HWOPT_TABLES = {"plugins", "card", "tuned_for"}


def read_view(path: Path, inputs: Inputs) -> View:
    """The view of a configuration file. Raises InputError if it is of no known tool, or not valid."""
    return view_of(read_source(path), inputs)


def view_of(source: SourceFile, inputs: Inputs) -> View:
    if source.language == "TOML":
        return hwopt_view(source, inputs)
    scores = {reader: source.top & reader.keys for reader in READERS if source.top & reader.telling}
    if scores:
        reader = max(scores, key=lambda each: len(scores[each] & each.telling))
        return reader.read(source, listing(sorted(scores[reader]), 4))
    if found := trainer.signature(source):
        return trainer.read(source, listing(sorted(found), 4))
    raise InputError(
        f"{source.name}: not recognised; none of its keys ({listing(sorted(source.top), 5)}) is known. "
        f"Expected a file of: {', '.join(TOOL_NAMES.values())}"
    )


def hwopt_view(source: SourceFile, inputs: Inputs) -> View:
    if {"model", "data"} & source.top and not HWOPT_TABLES & (source.top - {"plugins"}):
        return hwopt_files.read_job(source, inputs)
    if source.top & (HWOPT_TABLES | {"extends"}):
        return hwopt_files.read_profile(source, inputs)
    raise InputError(
        f"{source.name}: is TOML, but neither a profile ([plugins.NAME] tables) nor a job ([model] and [data]) of hwopt; "
        "hwopt reads configurations of other tools as YAML or JSON"
    )
