"""Profiles and jobs of hwopt as views: the plugins' options under the words that the plugins declare (`Plugin.aliases`)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hwopt.config.aliases import job_key, plugin_aliases
from hwopt.config.job import JobFile
from hwopt.config.job_training import Training
from hwopt.config.profile import Profile
from hwopt.configs.source_file import Entry, SourceFile
from hwopt.configs.view import ConfigSetting, View
from hwopt.configs.words import ARGUMENTS
from hwopt.errors import HwoptError
from hwopt.planning.inputs import Inputs
from hwopt.plugin.registry import Registry

JOB_WORDS = {key: word for word in ARGUMENTS if (key := job_key(word))}
"""(table, key) of a job -> its word."""
ALIAS = re.compile(r"plugins\.([\w-]+)\.(\w+)(?: = (.+))?")


def read_profile(source: SourceFile, inputs: Inputs) -> View:
    """The view of a profile with its parents. Raises InputError with all problems of the file."""
    return profile_view(inputs.profile(source.name), source, inputs.registry)


def profile_view(profile: Profile, source: SourceFile | None, registry: Registry) -> View:
    content = profile.content
    found = dict(words_of_options(dict(profile.plugin_tables()), registry))
    for word in content.training.model_fields_set:
        found[word] = (getattr(content.training, word), ("training", word))
    if content.data.max_length is not None:
        found["max_length"] = (content.data.max_length, ("data", "max_length"))
    if "max_length" not in found and content.tuned_for.max_length is not None:
        found["max_length"] = (content.tuned_for.max_length, ("tuned_for", "max_length"))
    texts = {profile.place("summary"): content.summary} if content.summary else {}
    view = made("hwopt-profile", found, profile.place, source, profile.document.name)
    return replace(view, texts=texts, parameters=content.tuned_for.parameters)


def read_job(source: SourceFile, inputs: Inputs) -> View:
    """The view of a job. Raises InputError with all problems of the file."""
    found = inputs.job(Path(source.name), ())
    assert found is not None  # a path is given
    return job_view(found, source, inputs.registry)


def job_view(job: JobFile, source: SourceFile, registry: Registry) -> View:
    tables = job.job.model_dump(exclude_unset=True)
    found: dict[str, tuple[Any, tuple[str, ...]]] = {}
    for (table, name), word in JOB_WORDS.items():
        if (value := tables.get(table, {}).get(name)) is not None:
            found[word] = (value, (table, name))
    for word, value in tables.get("training", {}).items():
        if value is not None:
            found[word] = (value, ("training", word))
    if job.plugins is not None:
        given = {name: table for name, table in job.plugins.data["plugins"].items() if table.get("enabled", True)}
        found |= dict(words_of_options(given, registry))
    return made("hwopt-job", found, job.place, source, source.name)


def made(tool: Any, found: Mapping[str, Any], place: Any, source: SourceFile | None, name: str) -> View:
    """A view of (word -> value, key), with the comments of the keys that are in `source` itself."""
    entries: Mapping[tuple[str, ...], Entry] = {entry.path: entry for entry in source.entries} if source else {}
    settings = {}
    for word, (value, key) in found.items():
        entry = entries.get(key)
        comments = (entry.comment, entry.above, entry.below) if entry else ("", (), ())
        settings[word] = ConfigSetting(word, value, ".".join(key), place(*key), *comments)
    return View(name, tool, "its tables", "TOML", settings, spelling=partial(spelled, plugin_aliases()))


def words_of_options(
    tables: Mapping[str, Mapping[str, Any]], registry: Registry
) -> Iterator[tuple[str, tuple[Any, tuple[str, ...]]]]:
    """Word -> (value, key), for each word of the vocabulary that a plugin declares for an option of its table."""
    for word, alias in plugin_aliases().items():
        found = ALIAS.fullmatch(alias)
        if found is None or word not in ARGUMENTS or found[1] not in tables:
            continue
        name, option, constant = found.groups()
        table = {key: value for key, value in tables[name].items() if key != "enabled"}
        if option == "enabled":
            yield word, (True, ("plugins", name))
        elif constant is None and option in table:
            yield word, (table[option], ("plugins", name, option))
        elif constant is not None and repr(options(name, table, registry).get(option)) == constant:
            yield word, (True, ("plugins", name, option))


def options(name: str, table: Mapping[str, Any], registry: Registry) -> dict[str, Any]:
    """The options of a plugin's table with its defaults; the table itself if it is not valid, which `hwopt plan` reports."""
    try:
        return dict(registry.plugin(name).Options.model_validate(table, strict=False).model_dump())
    except (HwoptError, ValueError):
        return dict(table)


def spelled(aliases: Mapping[str, str], word: str) -> str:
    """The key of hwopt for `word`."""
    if word in aliases:
        return aliases[word].split(" ")[0]
    if (key := job_key(word)) is not None:
        return ".".join(key)
    return f"training.{word}" if word in Training.model_fields else word
