"""`hwopt profiles`: list the profiles, or show one. Listing imports neither torch nor pydantic."""

from __future__ import annotations

import json
import os
import tomllib
from typing import Any

import click

from hwopt.cli.options import format_option, lister, say, say_json
from hwopt.config.profile_files import profile_files
from hwopt.errors import InputError
from hwopt.text import nearest, short_place


def list_profiles(format_: str) -> None:
    """Print name and summary of the installed profiles."""
    rows: list[dict[str, Any]] = []
    for name, path in profile_files().items():
        try:
            content = tomllib.loads(path.read_text(encoding="utf-8"))
            rows.append({"name": name, "summary": str(content.get("summary", "")), "file": str(path)})
        except (OSError, ValueError) as error:
            rows.append({"name": name, "summary": f"cannot be read: {error}", "file": str(path)})
    if format_ == "json":
        return say_json(rows)
    width = max((len(row["name"]) for row in rows), default=0)
    rows.append({"name": "auto", "summary": "The profile of this machine's card, or one derived from the nearest"})
    for row in rows:
        say(f"{row['name']:<{width}}  {row['summary']}", indent=" " * (width + 2))


profiles = lister("List the profiles, or show one.", list_profiles)


@profiles.command("show", help="Show a profile with its parents merged in, and where each value comes from.")
@click.argument("name")
@format_option
def show(name: str, format_: str) -> None:
    from hwopt.config.toml import leaves
    from hwopt.planning.inputs import Inputs

    files = profile_files()
    if name == "auto":
        raise InputError("auto is the profile that fits a machine: `hwopt plan --profile auto` names the one of this machine")
    if name not in files and not os.path.isfile(name):
        raise InputError(f"no profile {name[:60]!r} is installed.{nearest(name, files)} `hwopt profiles` lists all")
    profile = Inputs().profile(name)
    data = profile.document.data
    if format_ == "json":
        return say_json(data)
    for key, value in leaves(data):
        place = short_place(profile.document.place(key))
        say(f"{'.'.join(key)} = {json.dumps(value, default=str, ensure_ascii=False)}  # {place}")
