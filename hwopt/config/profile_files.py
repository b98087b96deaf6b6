"""The installed profiles: name -> TOML file, found through entry points."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata, util
from pathlib import Path

from hwopt.errors import PluginError

PROFILE_GROUP = "hwopt.profiles"


def profile_files() -> Mapping[str, Path]:
    """Name -> file of every installed profile. Reads no file and imports no package."""
    files: dict[str, Path] = {}
    for entry_point in metadata.entry_points(group=PROFILE_GROUP):
        spec = util.find_spec(entry_point.value)
        for folder in (spec.submodule_search_locations or []) if spec else []:
            for path in sorted(Path(folder).glob("*.toml")):
                first = files.setdefault(path.stem, path)
                if first != path:
                    raise PluginError(f"profile {path.stem!r} is installed twice: {first} and {path}; uninstall one of them")
    return dict(sorted(files.items()))
