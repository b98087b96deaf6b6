"""Checks a file: reads it, finds the card, applies the installed rules."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hwopt.config.card import Card
from hwopt.configs.check.checker import CheckReport, check, invalid
from hwopt.configs.check.facts import Given, facts_of
from hwopt.configs.check.registry import installed_rules
from hwopt.configs.hwopt_files import profile_view
from hwopt.configs.recognise import read_source, view_of
from hwopt.configs.source_file import SourceFile
from hwopt.configs.view import TOOL_NAMES, View
from hwopt.errors import InputError
from hwopt.planning.decisions import given_options
from hwopt.planning.inputs import Inputs


def check_file(path: Path, given: Given, inputs: Inputs | None = None) -> CheckReport:
    """The report on a configuration file. An invalid profile or job is a report with its problems as errors.

    Raises InputError if the file cannot be read or belongs to no known tool.
    """
    inputs = inputs or Inputs()
    source = read_source(path)
    try:
        view = view_of(source, inputs)
        if view.tool == "hwopt-profile":
            given_options(inputs.profile(str(path)), inputs.registry)
        if view.tool == "hwopt-job" and given.profile is not None:
            view = over_profile(view, path, given.profile, inputs)
    except InputError as error:
        if source.language == "TOML" and (tool := tool_of(source)):
            return invalid(str(path), tool, error)
        raise
    facts, card = facts_of(view, given, inputs, own_card(view, path, inputs))
    return check(view, facts, installed_rules(), card)


def tool_of(source: SourceFile) -> str:
    """The kind of an hwopt file that is not valid; "" for other TOML."""
    if source.top & {"plugins", "card", "tuned_for", "extends"} and not source.top & {"model", "data"}:
        return TOOL_NAMES["hwopt-profile"]
    return TOOL_NAMES["hwopt-job"] if source.top & {"model", "data"} else ""


def own_card(view: View, path: Path, inputs: Inputs) -> Card | None:
    return inputs.profile(str(path)).card if view.tool == "hwopt-profile" else None


def over_profile(view: View, path: Path, name: str, inputs: Inputs) -> View:
    """The view of a job with the profile's settings below its own. The size of the model is the job's, not the profile's.

    Raises InputError for plugin options of the job that are not valid.
    """
    profile = inputs.profile(name, (), inputs.job(path, ()))
    given_options(profile, inputs.registry)
    merged = profile_view(profile, None, inputs.registry).settings
    own = {word: setting for word, setting in view.settings.items() if word not in merged or setting.key.startswith("training.")}
    return replace(view, settings={**merged, **own})
